// resave.c: loads a checkpoint with the trainer's own code and saves it again, without a step between: what comes out must be what went in, on
// any number of ranks.
// usage: resave FLAGS as of train_gpt, with --resume DIR and another --out
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.c"

int main(int argc, char **argv) {
    static Run run;
    Checkpoint checkpoint = {0};
    Error error = {0};
    bool found = false;
    run.lock = run.monitor.log = -1;
    run.comm = comm_init(&argc, &argv);
    require_all(&run, options_parse(&run.options, argc, argv, &error), &error);
    require_all(&run, prepare(&run, &error), &error);
    require_all(&run, find_checkpoint(&run, &checkpoint, &found, &error), &error);
    if (!found || run.options.out == NULL) fail(&error, CODE_USAGE, "wanted --resume DIR and --out");
    require_all(&run, error.code == 0, &error);
    require_all(&run, !is_first(&run) || checkpoint_lock(run.options.out, &run.lock, &error), &error);
    require_all(&run, open_loaders(&run, &error), &error);
    trainer_create(&run.trainer, &run.options, &run.config, run.comm, device_cpu());
    trainer_init_parameters(&run.trainer); // so that what is not loaded shows
    load(&run, &checkpoint);
    checkpoint_close(&checkpoint);
    require_all(&run, !is_first(&run) || monitor_open(&run.monitor, run.options.out, run.options.steps, false, run.step, &error), &error);
    save(&run, true);
    require(&run, !is_first(&run) || monitor_close(&run.monitor, &error), &error);
    Model none = {0}; // the trainer has its own
    trainer_free(&run.trainer);
    run_end(&run, &none);
    return 0;
}
