"""Leave a page at each address that a page of this site has had, which leads to its successor.

A page that goes needs an entry in ``MOVED``; ``tests/pages/addresses.txt`` lists every address that
was ever published.
"""

from pathlib import Path
from posixpath import dirname, relpath

from recipe_index import JINJA
from sphinx.application import Sphinx

MOVED = {  # by the names of documents
    "guide/will_it_hide": "guide/what_to_use",
    "guide/affected": "guide/versions",
    "guide/reference_checkpoint": "guide/reference",
    "guide/reference_offload": "guide/reference",
    "guide/reference_storage": "guide/reference",
    "guide/reference_trainers": "guide/reference",
    "recipes/checkpoint/app_state": "recipes/checkpoint/state_to_save",
    "recipes/checkpoint/durable_saves": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/first_step": "recipes/checkpoint/load",
    "recipes/checkpoint/keep_verify_prune": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/kept_state": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/object_storage": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/overlapped_stager": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/overlapped_writer": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/preemption": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/process_checkpointer": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/resume_and_reshard": "recipes/checkpoint/load",
    "recipes/checkpoint/retention": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/staging_copies": "recipes/checkpoint/saves_beside_training",
    "recipes/checkpoint/two_hosts": "recipes/checkpoint/saves_beside_training",
    "recipes/offload/accumulate_and_average": "recipes/offload/train_what_does_not_fit",
    "recipes/offload/adam_in_pieces": "recipes/offload/train_what_does_not_fit",
    "recipes/offload/host_adam": "recipes/offload/train_what_does_not_fit",
    "recipes/offload/host_layers": "recipes/offload/weight_streaming",
    "recipes/offload/layer_as_node": "recipes/offload/weight_streaming",
    "recipes/offload/one_copy_a_host": "recipes/offload/train_what_does_not_fit",
    "recipes/offload/pipelined_optimizer": "recipes/offload/train_what_does_not_fit",
    "recipes/offload/streamed_model": "recipes/offload/train_what_does_not_fit",
    "recipes/offload/whole_step": "recipes/offload/train_what_does_not_fit",
    "recipes/sharding/copy_engine_gather": "recipes/sharding/peer_copies",
    "recipes/sharding/copy_engine_reduce": "recipes/sharding/peer_copies",
    "recipes/sharding/in_place_gather": "recipes/sharding/peer_copies",
    "recipes/sharding/in_place_reduce": "recipes/sharding/peer_copies",
    "recipes/sharding/peer_memory": "recipes/sharding/peer_copies",
    "recipes/sharding/peer_schedule": "recipes/sharding/peer_copies",
    "recipes/sharding/prefetch_schedule": "recipes/sharding/stream_context",
    "recipes/sharding/sharded_parameter": "recipes/sharding/stream_context",
    "recipes/sharding/shared_slots": "recipes/sharding/peer_copies",
    "recipes/sharding/update_in_order": "recipes/sharding/stream_context",
}


def write_redirects(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    template = JINJA.get_template("moved.html")
    for old, new in MOVED.items():
        if new in app.env.found_docs:
            page = Path(app.outdir, f"{old}.html")
            page.parent.mkdir(parents=True, exist_ok=True)
            there = relpath(f"{new}.html", dirname(old))
            page.write_text(template.render(there=there), encoding="utf-8")


def setup(app: Sphinx) -> dict:
    app.connect("build-finished", write_redirects)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
