"""The programs of ``in_place_training.py``: a model, a loop and the policies to train it under."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from in_place_accumulation import all_reduced_late, some_units_reduced_late
from in_place_loops import (
    accumulate,
    all_by_hand,
    averaging,
    backward_raises,
    begun_early,
    begun_then_assigned,
    begun_too_early,
    by_apply,
    by_broadcast,
    by_data_copy,
    by_hand,
    by_local_fill,
    by_set_state_dict,
    by_state_dict,
    changed_before_backward,
    changing,
    checkpointed_whole,
    divided,
    dropping_layers,
    early_exit,
    encoder_alone,
    evaluating,
    evaluation_between,
    freezing,
    from_meta,
    frozen_when_first_run,
    full_before_a_graph,
    in_backward,
    kept_gradients,
    kept_over_microbatches,
    never_all_at_once,
    no_backward,
    raises_before_another,
    raising,
    small_gradients,
    teaching,
    train,
    twice,
    two_optimizers,
    updated_in_forward,
)
from in_place_models import (
    POLICIES,
    CalledTwice,
    Complex,
    adapted,
    compiled,
    halved,
    hybrid,
    ignoring,
    on_meta,
    one_kept,
    reads_embedding,
    recomputed,
    replicated,
    shard,
    tied,
    tied_in_a_group,
    wrapped,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass
class Program:
    """How a user builds and trains; ``loop`` yields what must be equal."""

    build: Callable[[MixedPrecisionPolicy], nn.Module]
    loop: Callable[[nn.Module, torch.optim.Optimizer], Iterator]
    optimizer: Callable = field(default=partial(torch.optim.AdamW, lr=1e-2, foreach=False))
    policies: tuple[str, ...] = ("fp32",)
    compiled_sums: bool = False  # as on a GPU


EVERY = tuple(POLICIES)
NO_GRAD, INFERENCE = torch.no_grad, torch.inference_mode
PROGRAMS = {
    "plain": Program(shard, train, policies=EVERY),
    "compiled_sums": Program(shard, train, policies=("bf16",), compiled_sums=True),
    "fused": Program(shard, train, partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "kept_gradients": Program(shard, kept_gradients),
    "begun_early": Program(shard, begun_early),
    "begun_early_grouped": Program(partial(shard, grouped=True), begun_early),
    "begun_then_assigned": Program(shard, begun_then_assigned),
    "begun_too_early": Program(partial(shard, grouped=True), begun_too_early),
    "tied": Program(tied, train, policies=EVERY),
    "tied_in_a_group": Program(tied_in_a_group, train),
    "torchtitans_grouping": Program(partial(shard, grouped=True), train, policies=EVERY),
    "no_root": Program(partial(shard, root=False), partial(train, clip=False), policies=("plain",)),
    "never_all_at_once": Program(
        partial(shard, root=False),
        never_all_at_once,
        partial(torch.optim.SGD, lr=0.1),
        policies=("plain",),
    ),
    "complex": Program(
        lambda policy: shard(policy, model=Complex()),
        partial(train, clip=False),
        policies=("plain",),
    ),
    "float16": Program(halved, small_gradients),
    "full_before_a_graph": Program(shard, full_before_a_graph),
    "lora": Program(partial(adapted, dtype=torch.float32), train, policies=EVERY),
    "lora_mixed": Program(partial(adapted, dtype=torch.bfloat16), train),
    "ignored": Program(ignoring, partial(train, clip=False), policies=("plain",)),
    "accumulation": Program(shard, partial(accumulate, sync=True), policies=EVERY),
    "accumulation_without_sync": Program(shard, partial(accumulate, sync=False), policies=EVERY),
    "accumulation_of_some_units": Program(shard, some_units_reduced_late),
    "accumulation_hsdp": Program(hybrid, all_reduced_late),
    "accumulation_all_reduce_late": Program(shard, all_reduced_late),
    "kept": Program(partial(shard, reshard_after_forward=False), train),
    "one_kept": Program(one_kept, train),
    "one_kept_evaluated_first": Program(one_kept, partial(evaluating, how=NO_GRAD)),
    "reshard_to_int": Program(partial(shard, reshard_after_forward=2), train),
    "reshard_to_int_one": Program(partial(shard, reshard_after_forward=1), train),
    "checkpoint": Program(partial(recomputed, use_reentrant=False), train),
    "checkpoint_reentrant": Program(partial(recomputed, use_reentrant=True), train),
    "checkpoint_whole": Program(partial(shard, grouped=True), checkpointed_whole),
    "checkpoint_wrapper": Program(wrapped, train),
    "hsdp": Program(hybrid, train, policies=EVERY),
    "replicated": Program(replicated, train),
    "compiled_blocks": Program(partial(compiled, whole=False), train),
    "compiled_whole": Program(partial(compiled, whole=True), train),
    "evaluation": Program(shard, partial(evaluating, how=NO_GRAD)),
    "inference_mode": Program(shard, partial(evaluating, how=INFERENCE)),
    "inference_grouped": Program(partial(shard, grouped=True), partial(evaluating, how=INFERENCE)),
    "ema": Program(partial(shard, grouped=True), averaging),
    "load_state_dict": Program(shard, partial(changing, change=by_state_dict)),
    "load_assign": Program(shard, partial(changing, change=partial(by_state_dict, assign=True))),
    "set_state_dict": Program(shard, partial(changing, change=by_set_state_dict)),
    "data_copy": Program(shard, partial(changing, change=by_data_copy)),
    "local_in_place": Program(shard, partial(changing, change=by_local_fill)),
    "behind_torchs_back": Program(shard, partial(changing, change=by_broadcast)),
    "apply": Program(shard, partial(changing, change=by_apply)),
    "from_meta": Program(on_meta, from_meta),
    "no_backward": Program(partial(shard, grouped=True), no_backward),
    "unshard_by_hand": Program(shard, by_hand),
    "encoder_alone": Program(partial(shard, grouped=True), encoder_alone),
    "early_exit": Program(shard, early_exit),
    "two_optimizers": Program(shard, two_optimizers),
    "optimizer_in_backward": Program(shard, in_backward, policies=EVERY),
    "two_forwards": Program(shard, twice, policies=EVERY),
    "sum_not_mean": Program(shard, partial(divided, factor=1.0), policies=EVERY),
    "raising": Program(shard, raising),
    "evaluation_between": Program(shard, evaluation_between),
    "kept_over_microbatches": Program(
        partial(shard, reshard_after_forward=False), kept_over_microbatches
    ),
    "dropping_layers": Program(shard, dropping_layers),
    "freezing": Program(shard, freezing),
    "frozen_when_first_run": Program(shard, frozen_when_first_run),
    "all_by_hand": Program(shard, all_by_hand),
    "backward_raises": Program(shard, backward_raises),
    "raises_before_another": Program(shard, raises_before_another),
    "teaching": Program(shard, partial(teaching, local=False)),
    "teaching_shards": Program(shard, partial(teaching, local=True)),
    "updated_in_forward": Program(shard, updated_in_forward),
    "updated_in_forward_fused": Program(
        shard, updated_in_forward, partial(torch.optim.AdamW, lr=1e-2, fused=True)
    ),
    "changed_before_backward": Program(shard, changed_before_backward),
    "called_twice": Program(lambda policy: shard(policy, model=CalledTwice()), train),
    "reads_embedding": Program(reads_embedding, train),
    "reads_embedding_between": Program(reads_embedding, evaluation_between),
}
