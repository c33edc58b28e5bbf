"""What each rank of a layout makes of the model, by ranks whose process group is a fake: nothing is sent, so nothing can be taken over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from scaling.model import build_model
from scaling.parallel_model import build_part
from tests.scaling.test_parallel import laid


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["fsdp=4", "dp=2,fsdp=2", "fsdp=2,tp=2,sp=on", "pp=2,fsdp=2"])
def test_a_rank_holds_its_part_of_each_tensor_with_the_values_of_the_whole(layout: str) -> None:
    run = laid(layout)
    whole = dict(build_model(run).named_parameters())
    held = dict.fromkeys(whole, 0)
    for rank in range(4):
        with fake_rank(rank, 4):
            for name, tensor in build_part(run, rank, torch.device("cpu")).named_parameters():
                assert isinstance(tensor, DTensor)
                sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                assert torch.equal(tensor.to_local(), whole[name][place])
                held[name] += tensor.to_local().numel()
    copies = {held[name] / tensor.numel() for name, tensor in whole.items()}
    # Under tp embedding, readout and gains are on both of its ranks.
    assert copies == {"fsdp=4": {1}, "dp=2,fsdp=2": {2}, "fsdp=2,tp=2,sp=on": {1, 2}, "pp=2,fsdp=2": {1}}[layout]


def test_a_layout_on_a_new_group_works_with_that_group_and_not_with_one_that_has_ended() -> None:
    """Their meshes compare equal, and torch numbers groups in the order in which they are made."""
    for groups_before in (50, 0):
        with fake_rank(0, 4):
            for _ in range(groups_before):
                dist.new_group([0])
            part = build_part(laid("fsdp=2,tp=2,sp=on"), 0, torch.device("cpu"))
            part(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
