// bench_comm.c: all-reduce of 64 MB in shared memory against MPI_Allreduce, alternating in one run. Under mpirun.
#include "llmc/comm.h"

int main(int argc, char **argv) {
    Comm *comm = comm_init(&argc, &argv);
    enum { REPEATS = 7 };
    const int64_t n = 16 << 20;
    float *a = comm_alloc(comm, (size_t)n * 4), *plain = base_alloc((size_t)n * 4);
    double times[3][REPEATS];
    for (int r = 0; r < REPEATS; r++) {
        for (int way = 0; way < 3; way++) {
            comm_barrier(comm->world);
            const double began = clock_ms();
            if (way == 0) comm_all_reduce(comm->world, a, n, COMM_F32, COMM_SUM);
            if (way == 1) comm_all_reduce(comm->world, plain, n, COMM_F32, COMM_SUM);
#ifdef USE_MPI
            if (way == 2 && comm->mpi)
                comm_check_(comm, MPI_Allreduce(MPI_IN_PLACE, plain, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD), "MPI_Allreduce");
#endif
            times[way][r] = clock_ms() - began;
            for (int i = r; i > 0 && times[way][i] < times[way][i - 1]; i--) {
                const double t = times[way][i];
                times[way][i] = times[way][i - 1], times[way][i - 1] = t;
            }
        }
    }
    if (comm->rank == 0) {
        const double shared = times[0][REPEATS / 2], messages = times[1][REPEATS / 2], mpi = times[2][REPEATS / 2];
        printf("all_reduce of 64 MB, %d ranks, median of %d: %s %.1f ms, plain memory %.1f ms, MPI_Allreduce %.1f ms: MPI / ours %.2f\n",
               comm->size, REPEATS, comm_is_shared(comm, a) ? "shared memory" : "messages", shared, messages, mpi, mpi / shared);
    }
    comm_release(comm, a);
    free(plain);
    comm_finish(comm);
    return 0;
}
