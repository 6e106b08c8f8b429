# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/caches.py
"""Caches of keys and values that come to layers which backward runs again.

A layer gets a copy of an empty cache for each of its runs, and computes as with the cache. The
copies are dropped: kept, they would hold the keys and values of all layers until backward. So the
cache itself stays empty, and whoever goes on with it is refused.
"""

import torch

from .kept_things import attributes_of_object, is_object, set_attributes

_GIVEN = "_given_to_layers_in_training"  # an attribute of such a cache: the layers' numbers


def is_cache(value) -> bool:
    """Whether this is a cache, or the part of one that belongs to a layer; a class is none."""
    return hasattr(value, "get_seq_length") and not isinstance(value, type)


def _caches_in(args: tuple, kwargs: dict) -> list:
    """The caches among a layer's arguments."""
    return [x for x in (*args, *kwargs.values()) if is_cache(x)]


def copy_of(cache):
    """A copy of a cache: of its parts and their tensors, too, of convolutions' and scans' states.

    Its parts are what has attributes and belongs to no module: a hybrid's cache has some that are
    no caches by themselves. A configuration stays the same.
    """
    return _copy(cache, {})


def _copy(value, copies: dict[int, object]):
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, torch.Tensor):
        copies[id(value)] = value.clone()
    elif type(value) in (list, tuple, set):
        copies[id(value)] = type(value)(_copy(item, copies) for item in value)
    elif type(value) is dict:
        copies[id(value)] = {key: _copy(item, copies) for key, item in value.items()}
    elif is_cache(value) or is_object(value):
        other = object.__new__(type(value))
        copies[id(value)] = other
        attributes = attributes_of_object(value)
        set_attributes(other, {name: _copy(item, copies) for name, item in attributes.items()})
    else:
        return value
    return copies[id(value)]


def refuse_going_on(args: tuple, kwargs: dict) -> None:
    """Refuse a cache that a layer got in training, whose keys and values were dropped.

    Raises:
        ValueError: says what to do.
    """
    if any(hasattr(cache, _GIVEN) for cache in _caches_in(args, kwargs)):
        raise ValueError(
            "this cache is empty: layers that are trained run again in backward and keep no keys "
            "and values. Decode under torch.no_grad, from the first token on, with a new cache; "
            "or pass use_cache=False"
        )


def empty_copies(layer: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A layer's arguments with copies of caches, which are empty and stay so; notes who had them.

    Raises:
        ValueError: a cache is not empty, or the layer had it before.
    """
    found = _caches_in(args, kwargs)
    if not found:
        return args, kwargs
    for cache in found:
        had_by = vars(cache).setdefault(_GIVEN, set())
        if layer in had_by:
            refuse_going_on(args, kwargs)
        if cache.get_seq_length():
            raise ValueError(
                "a layer that is trained cannot go on with a cache: decode under torch.no_grad, or "
                "pass use_cache=False"
            )
        had_by.add(layer)
    args = tuple(copy_of(x) if is_cache(x) else x for x in args)
    return args, {name: copy_of(x) if is_cache(x) else x for name, x in kwargs.items()}
