"""All faults by the name that the documents know them by."""

from faults import (
    asked,
    damage,
    disks,
    drift,
    full_memory,
    golden,
    kept,
    kills,
    resume,
    several,
    shortages,
    soak,
    stops,
)
from faults.driver import Item

ITEMS: dict[str, Item] = {
    "R1": Item(
        what="resumed at every step",
        bar="every step: samples, losses, rates, tensors bit for bit",
        prove=resume.resume_at_every_step,
    ),
    "R4": Item(
        what="stopped after each step; started again when finished",
        bar="equal to the whole run; a finished run stays as it is",
        prove=resume.resume_again_and_again,
    ),
    "R5": Item(
        what="checkpointing and offload flags changed between the halves",
        bar="bit for bit",
        prove=resume.resume_with_other_flags,
    ),
    "R6": Item(
        what="a resume that is wrong on purpose",
        bar="R1 sees every one",
        prove=resume.break_the_resume,
    ),
    "K1": Item(
        what="kill -9 at random moments of real runs, until done",
        bar="0 saved steps lost; equal to the uninterrupted run",
        prove=kills.kill_real_runs,
    ),
    "K2": Item(
        what="kill -9 inside a save: at random, and at each call to the disk",
        bar="0 torn checkpoints; continued bit for bit",
        prove=kills.kill_saves,
    ),
    "D1": Item(
        what="power cut: each state of the disk after each call of a save",
        bar="the old checkpoint or the new one; each sync needed",
        prove=disks.cut_the_power,
    ),
    "D2": Item(
        what="disk full: at each call of a save, by a limit of the system, and for one of 2 processes",
        bar="exit 3 on all processes; earlier checkpoints good; continued bit for bit",
        prove=disks.fill_the_disk,
    ),
    "D3": Item(
        what="each file of a checkpoint altered; a run that finds its newest checkpoint damaged",
        bar="0 read; set aside untouched, and the one before it continued bit for bit",
        prove=damage.damage_checkpoints,
    ),
    "D4": Item(
        what="foreign files in the run folder; an old checkpoint that cannot be removed, or has vanished",
        bar="untouched; the run goes on",
        prove=damage.leave_foreign_files,
    ),
    "D5": Item(
        what="a second trainer in the same folder; a lock of a killed one",
        bar="refused with exit 2, the first goes on; no lock stays",
        prove=damage.start_two_trainers,
    ),
    "K4": Item(
        what="SIGTERM, SIGUSR1, SIGINT to train.py, accelerate launch, torchrun; at each stage; twice",
        bar="exit 75, checkpoint there, no process left; continued bit for bit",
        prove=stops.signal_everything,
        limit_s=300,
    ),
    "R2": Item(
        what="resumed with 2 processes",
        bar="bit for bit",
        prove=several.resume_with_two_processes,
        limit_s=300,
    ),
    "R3": Item(
        what="another number of processes in each part",
        bar="samples, noise, timesteps, rates identical; weights within 1e-6",
        prove=several.change_the_number_of_processes,
        limit_s=300,
    ),
    "K3": Item(
        what="one of 2 processes killed; stopped for seconds; stopped for good",
        bar="no process left 45 s later (for good: after train.step_timeout_minutes); continued bit for bit",
        prove=several.lose_a_process,
        limit_s=300,
    ),
    "H1": Item(
        what="NaN or infinity in loss, gradient, latents or captions of one of 2 processes",
        bar="skipped by both; weights finite; no process waits",
        prove=several.spoil_one_process,
    ),
    "H2": Item(
        what="a data worker killed; a data worker that hangs in a read",
        bar="exit 3 at once, or after the timeout; no process left; continued bit for bit",
        prove=shortages.lose_a_worker,
    ),
    "H3": Item(
        what="out of memory in forward, backward, optimizer and a preview",
        bar="exit 3 and continued bit for bit; what the answer says is so, and what it names helps; "
        "previews are skipped",
        prove=full_memory.run_out_of_memory,
    ),
    "R7": Item(
        what="the checkpoint of each released schema, kept in tests/training/golden",
        bar="loads; tensors exact, next losses those stored",
        prove=golden.load_golden_checkpoints,
    ),
    "C2": Item(
        what="each setting changed alone",
        bar="refused, refused without resume.allow, or free and then exact",
        prove=drift.change_each_setting,
        limit_s=300,
    ),
    "B1": Item(
        what="thousands of steps with saves, previews, held-out loss and a data worker",
        bar="memory grows by less than 5 %, open files and threads not at all; no folder too many",
        prove=soak.soak,
    ),
    "A1": Item(
        what="SAVE, SAMPLE and STOP files at random moments of runs of 1 and 2 processes, some then killed",
        bar="each done and gone; 0 saved steps lost; equal to the undisturbed run, the best the right one",
        prove=asked.ask_at_random,
    ),
    "A2": Item(
        what="kill -9 at calls to the disk of steps that save by time, for good, and as the best",
        bar="equal to the undisturbed run; the same checkpoints kept, lora_best/ that of the best",
        prove=kept.kill_what_is_kept,
    ),
}
