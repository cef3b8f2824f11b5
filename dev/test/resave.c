// resave.c: loads a checkpoint with the trainer's own code and saves it again, without a step between: what comes out must be what went in, on
// any number of ranks.
// usage: resave FLAGS as of train_gpt, with --resume DIR and another --out
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.c"

int main(int argc, char **argv) {
    static Run run;
    Setup *setup = &run.setup;
    Options *o = &setup->options;
    Trainer *t = &run.trainer;
    Error error = {0};
    setup->lock = run.monitor.log = -1;
    run.comm = setup->comm = comm_init(&argc, &argv);
    require_all(&run, options_parse(o, argc, argv, &error), &error);
    require_all(&run, setup_flags(setup, &error), &error);
    require_all(&run, setup_find_checkpoint(setup, &error), &error);
    if (!setup->resumes || o->out == NULL) fail(&error, CODE_USAGE, "wanted --resume DIR and --out");
    require_all(&run, error.code == 0, &error);
    require_all(&run, !is_first(&run) || checkpoint_lock(o->out, &setup->lock, &error), &error);
    require_all(&run, setup_open_loaders(setup, &error), &error);
    run.step = setup->step, run.tokens = setup->tokens;
    trainer_create(t, o, &setup->config, run.comm, device_cpu());
    trainer_init_parameters(t); // so that what is not loaded shows
    run.saving = (Saving){.setup = setup, .zero = &t->zero, .first_step = run.step};
    load(&run, &setup->checkpoint);
    checkpoint_close(&setup->checkpoint);
    require_all(&run, !is_first(&run) || monitor_open(&run.monitor, o->out, o->steps, false, run.step, &error), &error);
    save(&run, true);
    require(&run, !is_first(&run) || monitor_close(&run.monitor, &error), &error);
    trainer_free(t);
    run_end(&run);
    return 0;
}
