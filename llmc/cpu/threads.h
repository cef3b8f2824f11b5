// threads.h: how the OpenMP runtime waits between parallel loops.
#ifndef LLMC_CPU_THREADS_H
#define LLMC_CPU_THREADS_H

#include <omp.h>    // omp_set_num_threads
#include <stdlib.h> // getenv, setenv
#include <unistd.h> // execv, readlink, sysconf

// libgomp's threads spin for some 5 ms at the end of a loop before they sleep. On a machine that does anything else, a
// thread that lost its core then keeps all the others spinning, loop after loop: a step was seen to take 60 times as long.
// About 0.2 ms are enough to bridge the gaps inside a step. The runtime reads its environment before main(), so the
// program starts itself once more; what the user has set stays.
static inline void threads_wait_briefly(char **argv) {
    if (getenv("OMP_WAIT_POLICY") != NULL || getenv("GOMP_SPINCOUNT") != NULL) return;
    char path[4096]; // the file itself, so that the process keeps its name
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length <= 0 || setenv("GOMP_SPINCOUNT", "10000", 0) != 0) return; // failing changes only speed
    path[length] = '\0';
    execv(path, argv);
}

// Threads of this rank: its part of the cores, unless the user says otherwise. A rank that its launcher has bound to some of
// the cores keeps those to itself.
static inline void threads_share_host(int local_ranks) {
    const int usable = omp_get_num_procs(), online = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (getenv("OMP_NUM_THREADS") != NULL || local_ranks <= 1) return;
    const int threads = usable < online ? usable : online / local_ranks;
    omp_set_num_threads(threads > 0 ? threads : 1);
}

#endif
