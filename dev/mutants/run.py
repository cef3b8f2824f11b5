#!/usr/bin/env python3
"""Mutation test: applies the one-line faults of dev/mutants/*.txt, one at a time, to a copy of the tree, and demands that the
named test fails. A fault that survives, does not compile or no longer applies is an error.

A fault is a block of lines, blocks separated by blank lines, # starts a comment line:
    what: words for a person
    file: llmc/zero.h
    -: exact text (must occur once in the file)
    +: faulty text
    test: command that must fail, run in the copy (words of it that start with build/ or ./ are built first)

usage: run.py [--only WORD] [--list]
"""
import argparse
import glob
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read_table():
    faults = []
    for path in sorted(glob.glob(os.path.join(ROOT, "dev/mutants/*.txt"))):
        fault = {}
        for number, line in enumerate(open(path, encoding="utf-8").read().split("\n") + [""], 1):
            if line.startswith("#"):
                continue
            if not line.strip():
                if fault:
                    missing = {"what", "file", "-", "+", "test"} - set(fault)
                    if missing:
                        sys.exit(f"{path}:{number}: fault lacks {', '.join(sorted(missing))}")
                    fault["table"] = os.path.basename(path)
                    faults.append(fault)
                fault = {}
                continue
            key, _, value = line.partition(": ")
            fault[key.rstrip(":")] = value
    return faults


def run(command, directory, limit):
    try:
        done = subprocess.run(["bash", "-c", command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        return done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return 124, "timed out"


def targets_of(test):
    names = [word for word in test.split() if word.startswith(("build/", "./"))]
    return " ".join(dict.fromkeys("train_gpt" if name.endswith(".sh") else name.removeprefix("./") for name in names))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose description, file or table contains this")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    options = parser.parse_args()
    faults = [f for f in read_table() if options.only in f["what"] + " " + f["file"] + " " + f["table"]]
    if options.list:
        for fault in faults:
            print(f"{fault['file']}: {fault['what']}  ->  {fault['test']}")
        return 0
    copy = os.path.join(ROOT, "build/mutants")
    shutil.rmtree(copy, ignore_errors=True)
    os.makedirs(copy)
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split("\n")
    for name in filter(None, files):
        if os.path.isfile(os.path.join(ROOT, name)):
            os.makedirs(os.path.dirname(os.path.join(copy, name)), exist_ok=True)
            shutil.copy2(os.path.join(ROOT, name), os.path.join(copy, name))
    if os.path.isdir(os.path.join(ROOT, "data/out")):
        os.symlink(os.path.join(ROOT, "data/out"), os.path.join(copy, "data/out"))
    good = {}
    killed, problems = 0, []
    start = time.time()
    for fault in faults:
        test, path = fault["test"], os.path.join(copy, fault["file"])
        build = f"make -j2 CFLAGS='-O1 -march=native' {targets_of(test)} > build_log.txt 2>&1"
        if test not in good:  # the test must pass without the fault
            code, text = run(f"{build} && {test}", copy, 900)
            good[test] = code == 0
            if code != 0:
                problems.append(f"{test}: fails without any fault\n{text[-800:]}")
        if not good[test]:
            continue
        original = open(path, encoding="utf-8").read()
        count = original.count(fault["-"])
        if count != 1:
            problems.append(f"{fault['file']}: {fault['what']}: text occurs {count} times, wanted once: {fault['-']}")
            continue
        open(path, "w", encoding="utf-8").write(original.replace(fault["-"], fault["+"]))
        code, text = run(build, copy, 900)
        if code != 0:
            problems.append(f"{fault['file']}: {fault['what']}: the fault does not compile")
        else:
            code, text = run(test, copy, 900)
            if code == 0:
                problems.append(f"{fault['file']}: {fault['what']}: SURVIVED {test}")
            else:
                killed += 1
        print(f"{'killed  ' if code else 'PROBLEM '} {fault['file']}: {fault['what']} ({test})", flush=True)
        open(path, "w", encoding="utf-8").write(original)
    for problem in problems:
        print("PROBLEM", problem)
    print(f"{killed} of {len(faults)} faults found by their tests in {time.time() - start:.0f} s")
    return 1 if problems or not faults else 0


if __name__ == "__main__":
    sys.exit(main())
