"""All faults by the name that the documents know them by."""

from faults import (
    asked,
    bad_data,
    caches,
    clusters,
    damage,
    disks,
    diverging,
    drift,
    full_memory,
    golden,
    inputs,
    kept,
    kills,
    launches,
    lora_files,
    machines,
    media,
    model_folders,
    multinode,
    nodes,
    resume,
    several,
    shortages,
    slurm,
    soak,
    stops,
    untrusted,
)
from faults.driver import Item

ITEMS: dict[str, Item] = {
    "R1": Item(
        "resumed at every step",
        "every step: samples, losses, rates, tensors bit for bit",
        resume.resume_at_every_step,
    ),
    "R4": Item(
        "stopped after each step; started again when finished",
        "equal to the whole run; a finished run stays as it is",
        resume.resume_again_and_again,
    ),
    "R5": Item(
        "checkpointing and offload flags changed between the halves",
        "bit for bit",
        resume.resume_with_other_flags,
    ),
    "R6": Item(
        "a resume that is wrong on purpose",
        "R1 sees every one",
        resume.break_the_resume,
    ),
    "K1": Item(
        "kill -9 at random moments of real runs, until done",
        "0 saved steps lost; equal to the uninterrupted run",
        kills.kill_real_runs,
    ),
    "K2": Item(
        "kill -9 inside a save: at random, and at each call to the disk",
        "0 torn checkpoints; continued bit for bit",
        kills.kill_saves,
    ),
    "D1": Item(
        "power cut: each state of the disk after each call of a save",
        "the old checkpoint or the new one; each sync needed",
        disks.cut_the_power,
    ),
    "D2": Item(
        "disk full: at each call of a save, by a limit of the system, and for one of 2 processes",
        "exit 3 on all processes; earlier checkpoints good; continued bit for bit",
        disks.fill_the_disk,
    ),
    "D3": Item(
        "each file of a checkpoint altered; a run that finds its newest checkpoint damaged",
        "0 read; set aside untouched, and the one before it continued bit for bit",
        damage.damage_checkpoints,
    ),
    "D4": Item(
        "foreign files in the run folder; an old checkpoint that cannot be removed, or has vanished",
        "untouched; the run goes on",
        damage.leave_foreign_files,
    ),
    "D5": Item(
        "a second trainer in the same folder; a lock of a killed one",
        "refused with exit 2, the first goes on; no lock stays",
        damage.start_two_trainers,
    ),
    "D6": Item(
        "status, contract, lineage, metrics damaged or lost; files for folders, folders for files; no room",
        "repaired from the checkpoints, or named with the way out",
        damage.damage_the_run_folder,
    ),
    "D7": Item(
        "the run folder renamed, removed, or become another run's, in a step and inside a save",
        "exit 3, nothing in its place; what was moved continued bit for bit",
        damage.lose_the_folder,
    ),
    "K4": Item(
        "SIGTERM, SIGUSR1, SIGINT, SIGHUP to train.py, accelerate launch, torchrun; at each stage; twice; "
        "SIGHUP under nohup",
        "exit 75, checkpoint there, no process left; continued bit for bit; under nohup it goes on",
        stops.signal_everything,
    ),
    "K5": Item(
        "the log lost: a closed pipe, a terminal that is gone, a full disk under it",
        "exit 0, status and metrics as ever, equal",
        stops.lose_the_log,
    ),
    "R2": Item(
        "resumed with 2 processes",
        "bit for bit",
        several.resume_with_two_processes,
    ),
    "R3": Item(
        "another number of processes in each part",
        "samples, noise, timesteps, rates identical; weights within 1e-6",
        several.change_the_number_of_processes,
    ),
    "N1": Item(
        "2 machines of 2 processes that share neither run folder nor cache nor data: started, started again "
        "when finished, continued; the main process elsewhere, no data, no run folder",
        "equal to the run with shared folders; what is refused is with its reason on both, exit code 2, all "
        "gone within 20 s",
        machines.share_no_folders,
    ),
    "N2": Item(
        "2 simulated nodes of 2 processes by torchrun, with shared folders and with own ones under one path: "
        "started, started again when finished, stopped by SIGTERM, continued with one node late; settings "
        "that differ, a node whose disk is read-only",
        "equal bit for bit; what is refused is on both, exit code 2; each node's log says how it ended",
        multinode.run_on_two_nodes,
        needs=nodes.NEEDS,
    ),
    "N3": Item(
        "a simulated node never comes; its processes are killed; its network is cut",
        "all trainers gone within the time-outs, each node's log says what happened; continued bit for bit",
        multinode.fail_on_two_nodes,
        needs=nodes.NEEDS,
    ),
    "N4": Item(
        "examples/slurm under a SLURM of 2 simulated nodes: cache by parts, trained on 1 and 2 nodes, "
        "started again when finished, the time limit, a step cancelled, processes of a node killed, a "
        "node that dies",
        "after the time limit, and where SLURM misses a node, queued again and continued without anybody, "
        "else not; bit for bit; each node's log says how it ended",
        slurm.run_the_examples,
        needs=clusters.SLURM_NEEDS,
    ),
    "K3": Item(
        "one of 2 processes killed; stopped for seconds; stopped for good",
        "no process left 45 s later (for good: after train.step_timeout_minutes); continued bit for bit",
        several.lose_a_process,
    ),
    "P1": Item(
        "launchers used by mistake, for train, cache and sample; variables of torchrun and MPI on the CPU",
        "refused in one line with exit 2 and the command that is right; the others are one run",
        launches.mistake_the_launcher,
    ),
    "P2": Item(
        "process 1 of 2 with other settings, base, pictures, versions or sources; on 2 machines, too",
        "all end with exit 2 before anything is loaded; the log of each machine says what differs",
        launches.start_different_runs,
    ),
    "H1": Item(
        "NaN or infinity in loss, gradient, latents or captions of one of 2 processes",
        "skipped by both; weights finite; no process waits; where the last step was skipped, exit code 3",
        several.spoil_one_process,
    ),
    "H2": Item(
        "a data worker killed; a data worker that hangs in a read",
        "exit 3 at once, or after the timeout; no process left; continued bit for bit",
        shortages.lose_a_worker,
    ),
    "H3": Item(
        "out of memory in forward, backward, optimizer and a preview",
        "exit 3 and continued bit for bit; what the answer says is so, and what it names helps; previews "
        "are skipped",
        full_memory.run_out_of_memory,
    ),
    "H4": Item(
        "weights ruined or infinite in a run that saves after each step; NaN in other places",
        "exit 3; the last good checkpoint stays, is named, and is continued with a lower rate",
        diverging.diverge,
    ),
    "R7": Item(
        "the checkpoint of each released schema, kept in tests/training/golden",
        "loads; tensors exact, next losses those stored",
        golden.load_golden_checkpoints,
    ),
    "C2": Item(
        "each setting changed alone",
        "refused, refused without resume.allow, or free and then exact",
        drift.change_each_setting,
    ),
    "C1": Item(
        "wrong configs, overrides, flags and paths",
        "exit 2, names the place, before a model is loaded; no traceback",
        inputs.refuse_wrong_configs,
    ),
    "C3": Item(
        "a config written and read again",
        "the same config",
        inputs.write_and_read_configs,
    ),
    "C4": Item(
        "each setting at extremes: numbers, texts, lists; 20,000 wrong keys",
        "taken or refused in one line of at most 500 characters, in 2 s of a processor",
        inputs.go_to_extremes,
    ),
    "M1": Item(
        "odd and bad pictures and clips, alone and in a run",
        "each as its table says, in 5 s and 1 GiB; the run leaves out exactly what is bad",
        media.read_odd_media,
    ),
    "M2": Item(
        "pictures and clips damaged at random",
        "no crash, no hang, no clip that is short without an error",
        media.damage_media,
    ),
    "M3": Item(
        "runs with 5 % of bad items and two bad captions, and with 30 %",
        "5 %: left out, continued bit for bit; 30 %: exit 2, as all that a user can fix",
        bad_data.train_on_bad_data,
    ),
    "V1": Item(
        "each input of a cached tensor changed alone; kill -9 while caching, also by parts; entries that rot",
        "exactly what depends on it is encoded anew; no entry torn, none encoded twice; rot is found",
        caches.distrust_the_cache,
    ),
    "S1": Item(
        "pickles in the place of each file that a run reads",
        "none is unpickled: no code runs, and no name is looked up",
        untrusted.plant_pickles,
    ),
    "S2": Item(
        "file names that lead out of the data, in each place that holds one",
        "nothing outside is named, opened or fetched",
        untrusted.lead_out_of_the_data,
    ),
    "S3": Item(
        "secrets in environment, yaml, URL, command line and errors",
        "0 in all bytes of the run folder, the cache and the screen",
        untrusted.leak_secrets,
    ),
    "S4": Item(
        "runs without a network",
        "pass, and try no connection",
        untrusted.cut_the_network,
    ),
    "S5": Item(
        "model folders damaged or hostile: each file, each setting, headers, tensors, indices",
        "refused with a line, or possible; nothing executed, no memory taken for what a size says",
        model_folders.attack_folders,
    ),
    "S6": Item(
        "LoRA files damaged or hostile: file, header, tensors, settings in them and beside them",
        "refused with a line, or without effect; nothing executed",
        lora_files.attack_lora_files,
    ),
    "B1": Item(
        "thousands of steps with saves, previews, held-out loss and a data worker",
        "memory grows by less than 5 %, open files and threads not at all; no folder too many",
        soak.soak,
    ),
    "A1": Item(
        "SAVE, SAMPLE and STOP files at random moments of runs of 1 and 2 processes, some then killed",
        "each done and gone; 0 saved steps lost; equal to the undisturbed run, the best the right one",
        asked.ask_at_random,
    ),
    "A2": Item(
        "kill -9 at calls to the disk of steps that save by time, for good, and as the best",
        "equal to the undisturbed run; the same checkpoints kept, lora_best/ that of the best",
        kept.kill_what_is_kept,
    ),
}
