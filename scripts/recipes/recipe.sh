# shellcheck shell=bash
# recipe.sh: what the recipes of many ranks share; they source it, set the arrays below and call recipe_run "$@" in the root of the repository.
#   recipe_name      where a run is written: runs/NAME
#   recipe_ranks     ranks of the whole run
#   recipe_flags     model, batch, learning rate ...
#   recipe_layout    flags of the layout
#   recipe_small     flags of the miniature: they follow the others, so that they override them
#
# shellcheck disable=SC2154 # the arrays are the recipes'
#
# A recipe is what every rank executes. It knows three ways:
#   under a launcher (scripts/launch_mpirun.sh, scripts/launch_slurm.sh): the run itself
#   --dry-run       anywhere: checks and plans the whole run for its number of ranks, in a second, on this machine
#   --miniature     (or MINIATURE=1) on this machine: 8 ranks of a tiny model on the bytes of README.md, with the same kinds of parallelism; starts mpirun
# Environment: TRAIN, VAL (globs of token files), OUT (directory), RANKS (for --dry-run).

recipe_launched() { [ -n "${OMPI_COMM_WORLD_SIZE:-}${PMI_SIZE:-}${PMI_RANK:-}${PMI_FD:-}${PMIX_RANK:-}" ]; }

recipe_stop() {
    echo "$recipe_name: $1" >&2
    exit 2
}

# Bytes of README.md as tokens; several recipes may make them at once.
recipe_bytes() {
    local file=data/out/miniature
    [ -x ./tokenize ] || recipe_stop "./tokenize is missing: make"
    mkdir -p data/out
    if [ ! -s $file.bin ] || [ ! -s $file.json ]; then ./tokenize --out $file README.md >/dev/null; fi
    TRAIN=$file.bin VAL=
}

recipe_run() {
    local miniature=${MINIATURE:-0} dry=no argument
    local arguments=() command=(./train_gpt "${recipe_flags[@]}" "${recipe_layout[@]}")
    for argument in "$@"; do
        case $argument in
        --miniature) miniature=1 ;;
        --dry-run) dry=yes ;;
        *) arguments+=("$argument") ;;
        esac
    done
    [ -x ./train_gpt ] || recipe_stop "./train_gpt is missing: make"
    if [ "$miniature" != 0 ]; then
        recipe_launched && recipe_stop "--miniature starts its ranks itself: not under a launcher"
        recipe_bytes
        recipe_ranks=8
        command+=("${recipe_small[@]}")
        [ -z "${OUT:-}" ] || command+=(--out "$OUT")
    else
        recipe_ranks=${RANKS:-$recipe_ranks}
        command+=(--resume auto --out "${OUT:-runs/$recipe_name}")
    fi
    [ -z "${TRAIN:-}" ] || command+=(--train "$TRAIN")
    [ -z "${VAL:-}" ] || command+=(--val "$VAL")
    command+=("${arguments[@]}")
    if [ $dry = yes ]; then
        recipe_launched && recipe_stop "--dry-run needs no launcher"
        exec "${command[@]}" --dry-run --world "$recipe_ranks"
    elif [ "$miniature" != 0 ]; then
        exec scripts/launch_mpirun.sh --ranks "$recipe_ranks" -- "${command[@]}"
    fi
    recipe_launched || recipe_stop "wants $recipe_ranks ranks: scripts/launch_mpirun.sh or scripts/launch_slurm.sh (or --dry-run, --miniature)"
    exec "${command[@]}"
}
