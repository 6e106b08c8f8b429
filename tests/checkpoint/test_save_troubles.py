"""What a save may not do to training, to other ranks and to other checkpoints."""

from troubles import survives


def test_nothing_wrong_gets_the_name_of_a_checkpoint() -> None:
    """A full disk, files of before, a rank that cannot stage, a group that is gone."""
    two = ("disk_full", "cut_off_before", "group_gone", "one_rank_cannot_stage")
    survives("save_troubles", *two, ranks=2)


def test_a_save_leaves_the_training_as_it_is() -> None:
    """Before the first step, with every optimizer of torch; with a stager that orders nothing."""
    survives("save_troubles", "before_the_first_step", "a_stager_that_nobody_waits_for")
