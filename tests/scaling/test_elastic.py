"""How ranks meet that torchrun has started again (`tests.scaling.test_parallel` kills those of a run)."""

from __future__ import annotations

import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scaling.ranks import agree_on_attempt


def meet(port: int, size: int = 3) -> set[str]:
    """The names that `size` ranks agree on, each with a connection of its own to a store that was there before them."""
    names: dict[int, str] = {}

    def rank(number: int) -> None:
        names[number] = agree_on_attempt(TCPStore("127.0.0.1", port, is_master=False), number, size)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(names) == size, f"only ranks {sorted(names)} of {size} have met"
    return set(names.values())


def test_ranks_agree_on_a_new_attempt_whatever_dead_ones_left_in_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("asks/2", "a rank that was killed as it waited for rank 0")
    first = meet(server.port)
    assert len(first) == 1
    server.set("asks/1", "a rank that was killed as it waited for rank 0")
    second = meet(server.port)
    assert len(second) == 1
    assert first != second
