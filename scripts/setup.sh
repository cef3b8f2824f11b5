#!/usr/bin/env bash
# Installs what is missing to build and run train_gpt on Debian and Ubuntu; with --test also what scripts/test.sh uses.
# Does nothing, quickly, when nothing is missing. Elsewhere it checks, and prints what to install.
set -euo pipefail

test_too=no
case "${1:-}" in
"") ;;
--test) test_too=yes ;;
*)
    echo "usage: scripts/setup.sh [--test]" >&2
    exit 2
    ;;
esac

has_header() { printf '#include <%s>\nint main(void) { return 0; }\n' "$1" | "${CC:-cc}" -x c -fsyntax-only - 2>/dev/null; }
has_plot() {
    local python
    for python in python3 /usr/bin/python3; do
        command -v "$python" >/dev/null && "$python" -c 'import matplotlib, numpy' 2>/dev/null && return 0
    done
    return 1
}
has_fuzzer() { echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d == 0 && n; }' | clang -x c -fsanitize=fuzzer -o /dev/null - 2>/dev/null; }

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    missing=()
    command -v "${CC:-cc}" >/dev/null || missing+=("a C compiler (gcc 9 or clang 14, or newer)")
    command -v make >/dev/null || missing+=("make")
    has_header jansson.h || missing+=("jansson (jansson.h)")
    has_header xxhash.h || missing+=("xxHash (xxhash.h)")
    has_header dnnl.h || has_header cblas.h || echo "setup: oneDNN (dnnl.h) or OpenBLAS (cblas.h) is not installed: matrix products will be several times slower"
    command -v mpicc >/dev/null || echo "setup: Open MPI (mpicc, mpirun) is not installed: one rank only"
    has_plot || echo "setup: python3 with matplotlib and numpy is not installed: scripts/plot.py will not run"
    if [ ${#missing[@]} -gt 0 ]; then
        echo "setup: this is not Debian or Ubuntu; please install:" >&2
        printf 'setup:   %s\n' "${missing[@]}" >&2
        exit 1
    fi
    exit 0
fi

wanted=()
command -v gcc >/dev/null || wanted+=(gcc)
command -v make >/dev/null || wanted+=(make)
command -v git >/dev/null || wanted+=(git)
wanted+=(libc6-dev libjansson-dev libxxhash-dev openmpi-bin libopenmpi-dev bible-kjv bible-kjv-text)
has_plot || wanted+=(python3 python3-matplotlib python3-numpy)
has_header dnnl.h || wanted+=(libdnnl-dev)
if [ $test_too = yes ]; then
    wanted+=(libopenblas-dev binutils) # addr2line names the lines of races in the simulated device
    command -v g++ >/dev/null || wanted+=(g++)
    command -v clang >/dev/null || wanted+=(clang)
    command -v clang-format >/dev/null || wanted+=(clang-format)
    command -v clang >/dev/null && echo '#include <omp.h>' | clang -fopenmp -x c -fsyntax-only - 2>/dev/null || wanted+=(libomp-dev)
    has_fuzzer || wanted+=(libclang-rt-dev)
    command -v pgrep >/dev/null || wanted+=(procps)
fi

missing=()
for package in "${wanted[@]}"; do
    status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "setup: not root and no sudo; please run as root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"; }

# Releases differ: takes the other name of a package that this one does not have.
available() { [ -n "$(apt-cache search --names-only "^$1\$")" ]; }
replace_unavailable() {
    local i version
    for i in "${!missing[@]}"; do
        available "${missing[$i]}" && continue
        case ${missing[$i]} in
        libdnnl-dev) missing[$i]=libopenblas-dev ;;
        libclang-rt-dev)
            version=$(apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -1)
            missing[$i]=libclang-rt-$version-dev
            available "${missing[$i]}" || missing[$i]=libclang-common-$version-dev
            ;;
        esac
    done
}

if ! apt-get install --simulate -qq "${missing[@]}" >/dev/null 2>&1; then
    "${as_root[@]}" apt-get update -q # the lists are missing or old
    replace_unavailable
fi
echo "setup: installing ${missing[*]}"
if ! install "${missing[@]}"; then
    "${as_root[@]}" apt-get update -q
    install "${missing[@]}"
fi
