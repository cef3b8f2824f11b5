// test_algorithms.cuh: the file of choices of cuBLASLt's algorithms: a second run takes what the first one chose, also a verdict against an
// epilogue; foreign and damaged files are left alone and change nothing.
#ifndef TEST_CUDA_TEST_ALGORITHMS_CUH
#define TEST_CUDA_TEST_ALGORITHMS_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include "llmc/cuda/cuda.cuh"        // cuda_of
#include "llmc/cuda/device.h"        // device_cuda
#include <algorithm>                 // std::count
#include <cstdlib>                   // setenv, mkdtemp
#include <fstream>                   // std::ifstream
#include <sstream>                   // std::stringstream
#include <unistd.h>                  // rmdir, unlink

static std::string algorithms_slurp_(const std::string &path) {
    std::stringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}
static void algorithms_spill_(const std::string &path, const std::string &text) { std::ofstream(path, std::ios::binary) << text; }

// The kernels of ours that a linear layer with GELU starts on a new device, with the results compared.
static int64_t algorithms_launches_(Compare *t, const std::string &path) {
    const int64_t N = 24, IC = 32, OC = 16;
    const Buffer none = {};
    setenv("TRAIN_GPT_ALGORITHMS", path.c_str(), 1);
    Device fresh = device_cuda(0), *usual = t->device[1];
    unsetenv("TRAIN_GPT_ALGORITHMS");
    t->device[1] = &fresh;
    const Both in = both_random(t, N * IC, DTYPE_BF16, 0, 1), weight = both_random(t, OC * IC, DTYPE_BF16, 0, 1);
    const Both out = both_output(t, N * OC, DTYPE_BF16), activated = both_output(t, N * OC, DTYPE_BF16);
    const auto run = [&](Device *d, int w) { d->linear_forward(d, out[w], activated[w], in[w], weight[w], none, N, IC, OC); };
    on_both(t, run); // chooses
    const int64_t before = cuda_of(&fresh)->launches;
    run(&fresh, 1);
    const int64_t launches = cuda_of(&fresh)->launches - before;
    compare(t, "algorithms, out", out, 2e-6);
    compare(t, "algorithms, gelu_out", activated, 0x1p-9, 2.2);
    compare_release(t);
    fresh.close(&fresh);
    t->device[1] = usual;
    return launches;
}

// A file that must be ignored and not be changed. Its good lines, if any, say what the usual choice, with so many launches, does not.
static void algorithms_ignored_(Compare *t, const char *what, const std::string &path, const std::string &text, int64_t launches) {
    compare_case(t, "%s", what);
    algorithms_spill_(path, text);
    compare_record(t, "algorithms, file is ignored", algorithms_launches_(t, path) != launches, 0);
    compare_record(t, "algorithms, file is left alone", algorithms_slurp_(path) != text, 0);
}

static void test_algorithms(Compare *t) {
    char directory[] = "/tmp/test_algorithms_XXXXXX";
    if (mkdtemp(directory) == nullptr) {
        compare_record(t, "algorithms, directory in /tmp", 1, 0);
        return;
    }
    const std::string path = std::string(directory) + "/choices";
    compare_case(t, "no file yet");
    const int64_t launches = algorithms_launches_(t, path);
    const std::string first = algorithms_slurp_(path);
    compare_record(t, "algorithms, choices are kept", std::count(first.begin(), first.end(), '\n') >= 3 ? 0 : 1, 0);

    compare_case(t, "second run");
    compare_record(t, "algorithms, the same way again", algorithms_launches_(t, path) != launches, 0);
    compare_record(t, "algorithms, nothing to choose again", algorithms_slurp_(path) != first, 0);

    // fields: 15 of the product, verdict, ms, 8 of the algorithm. The epilogue's verdict is turned round: the other way must be taken, with good
    // results.
    std::string turned, poisoned, line;
    std::stringstream lines(first);
    for (int number = 0; std::getline(lines, line); number++) {
        std::stringstream words(line);
        std::string word, other = line, bad = line;
        if (number > 0) {
            other.clear(), bad.clear();
            for (int field = 0; words >> word; field++) {
                other += (field == 0 ? "" : " ") + (field == 15 && word != "0" ? std::string(word == "1" ? "2" : "1") : word);
                bad += (field == 0 ? "" : " ") + (field >= 17 ? std::string("ffffffffffffffff") : word);
            }
        }
        turned += other + "\n", poisoned += bad + "\n";
    }
    compare_case(t, "verdict turned round");
    algorithms_spill_(path, turned);
    compare_record(t, "algorithms, verdict of the file counts", algorithms_launches_(t, path) == launches, 0);
    compare_case(t, "algorithms that the library does not offer");
    algorithms_spill_(path, poisoned);
    algorithms_launches_(t, path);
    const std::string healed = algorithms_slurp_(path);
    compare_record(t, "algorithms, chosen anew and appended", healed.size() <= poisoned.size() || healed.compare(0, poisoned.size(), poisoned) != 0,
                   0);
    algorithms_launches_(t, path);
    compare_record(t, "algorithms, nothing to choose again", algorithms_slurp_(path) != healed, 0);

    const size_t lines_at = turned.find('\n') + 1;
    const std::string body = turned.substr(lines_at, turned.size() - lines_at - 1); // without the last newline
    algorithms_ignored_(t, "another version", path, "train_gpt algorithms 2, cuBLASLt 9" + turned.substr(34), launches);
    algorithms_ignored_(t, "another device", path, turned.substr(0, lines_at - 2) + "?\n" + body + "\n", launches);
    algorithms_ignored_(t, "not ours", path, "hello", launches);
    algorithms_ignored_(t, "a line cut short", path, turned.substr(0, turned.size() - 5), launches);
    algorithms_ignored_(t, "a word too many", path, turned.substr(0, turned.size() - 1) + " 0\n", launches);
    algorithms_ignored_(t, "not a number", path, turned + "0 0 0 one\n", launches);
    algorithms_ignored_(t, "time is not a number", path, turned + "0 0 0 1 1 1 1 1 0 1 256 256 256 0 0 0 nan 0 0 0 0 0 0 0 0\n", launches);
    algorithms_ignored_(t, "a zero byte", path, turned + std::string(1, '\0'), launches);
    unlink(path.c_str());
    compare_case(t, "a directory, a path that cannot be");
    algorithms_launches_(t, directory);
    algorithms_launches_(t, std::string(directory) + "/no/such");
    compare_record(t, "algorithms, file is left alone", rmdir(directory) != 0, 0);
}

#endif
