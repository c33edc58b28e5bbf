"""One run spread over several processes of this machine, or over those that torchrun started: data parallel, rank 0 leads.

Owns the processes and what they say to each other. Rank 0 is the process that was asked for the run: it alone reads and writes files,
and tells the others what to do (`Group.tell`), so that whatever it decides (to stop early, to give up) needs nobody's consent. The
others `follow` until it ends. Each has its share of every batch; gradients are averaged by torch's DistributedDataParallel, over gloo
on CPUs and NCCL on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import IO, Any, Literal, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from scaling.config import RunConfig
from scaling.errors import ConfigError, Fault, Interrupted, UserError
from scaling.parallel import require_layout
from scaling.torchrun import leave, note_group, started_by_torchrun, world_size

PATIENCE = timedelta(days=30)
"""How long a rank waits for another: rank 0 may look for work that long. A rank that dies closes its connections, which is seen at once."""
LAST_WORDS_S = 2.0
"""How long a rank that died may take to be seen as dead by its parent."""
POLL_S = 0.02
"""Between two looks at the store."""
Order = Literal["train", "load", "step", "validate", "process_s", "save", "load_shards", "end"]


class RankDied(Exception):
    """A process of the run ended before the run did."""


@dataclass(frozen=True)
class Group:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def device(self, kind: str) -> torch.device:
        """This rank's device: the GPUs that are visible are dealt out by local rank."""
        return torch.device(kind, self.local_rank) if kind == "cuda" and self.size > 1 else torch.device(kind)

    def tell(self, order: Order, argument: Any = None) -> None:
        """Rank 0: have the others do the same; nothing where there are none, or in them."""
        if self.size > 1 and self.rank == 0:
            dist.broadcast_object_list([order, argument], src=0, device=torch.device("cpu"))

    def told(self) -> tuple[Order, Any]:
        """What rank 0 tells this rank."""
        orders: list[Any] = [None, None]
        dist.broadcast_object_list(orders, src=0, device=torch.device("cpu"))
        return orders[0], orders[1]

    def sum(self, *values: float) -> list[float]:
        """Each value's sum over the ranks."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def data(self, tp: int, stages: int = 1) -> Group:
        """The ranks that see different sequences: rank and size to share a batch by.

        `tp` neighbours share theirs, and so do the ranks at the same place of each of `stages` equal parts of the group.
        """
        size = self.size // stages
        return Group(self.rank % size // tp, size // tp, self.local_rank)

    def share(self, batch: Tensor) -> Tensor:
        """This rank's rows."""
        rows = len(batch) // self.size
        return batch[self.rank * rows : (self.rank + 1) * rows]

    def averaging(self, model: nn.Module, loss: Callable[..., Tensor]) -> nn.parallel.DistributedDataParallel | None:
        """`loss` as a module whose backward pass averages the gradients of `model` over the ranks; None where there is one."""
        return nn.parallel.DistributedDataParallel(_Loss(model, loss)) if self.size > 1 else None


ALONE = Group()
T = TypeVar("T")
_ended: list[Any] = []
"""Groups that are done with, never freed: the last to let go would join gloo's threads with the interpreter's lock held, which one of
them may wait for to let go of a tensor, and neither would end (torch 2.13, where a rank has died: one time in four)."""
_kept: dict[Any, dict[Hashable, Any]] = {}


def once_a_group(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes for the process group that is there, made for the first run that asks: torch never frees threads and sockets."""
    world = dist.group.WORLD
    if world not in _kept:
        _kept.clear()
        _kept[world] = {}
    if key not in _kept[world]:
        _kept[world][key] = make()
    found: T = _kept[world][key]
    return found


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._compute = model, loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self._compute(tokens)


class Team:
    """The processes that a worker spreads its runs over: started for the first that wants some, kept for the next."""

    def __init__(self) -> None:
        """Meets torchrun's other ranks where there are some: they wait, also when no run is left to make."""
        self._others: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._given = started_by_torchrun(os.environ)
        self._group: Group | None = None
        if self._given:
            with _a_lost_rank_said():
                self._group = join()
        self._broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if error is None:
            self.end()
        else:
            self._dismiss()

    def end(self) -> None:
        """Let the others go. A process that ends without a word takes those of its own machine with it all the same."""
        if self._group is not None:
            # A follower that has died meanwhile needs no word.
            with contextlib.suppress(RuntimeError):
                self._group.tell("end")
            for process, _ in self._others:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LAST_WORDS_S)
        self._dismiss()

    @contextmanager
    def run(self, run: RunConfig) -> Iterator[Group]:
        """The group that trains `run`, told to. Raises RankDied with a rank's last words when one ends in the middle.

        Raises ConfigError when the batch cannot be shared, Interrupted when one of torchrun's other ranks is gone.
        """
        size = world_size(os.environ) if self._given else run.runtime.processes
        require_layout(run, size if self._given else None)
        if size == 1:
            yield ALONE
            return
        if run.runtime.parallel is None and run.training.batch_size % size:
            what = f"{run.training.batch_size} sequences cannot be shared equally by {size} processes"
            raise ConfigError(Fault("training.batch_size", what, "set a multiple, or other processes"))
        if self._broken:
            cure = "start it again; with --max-restarts torchrun does that by itself"
            raise Interrupted(Fault("torchrun", "another rank died, or was left in the middle of a run", cure))
        try:
            if self._group is None or self._group.size != size:
                self._dismiss()
                self._group = self._assemble(size)
            self._group.tell("train", run)
            yield self._group
        except BaseException as error:
            # The others are somewhere in that run, and nothing can be said to them.
            words = self._last_words() if isinstance(error, RuntimeError) else None
            self._dismiss()
            self._broken = self._given
            if self._given:
                with _a_lost_rank_said():
                    raise
            if words is None or isinstance(error, UserError):
                raise
            raise RankDied(words) from error

    def _assemble(self, size: int) -> Group:
        """Start the other ranks on this machine, and meet them."""
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        for rank in range(1, size):
            log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
            command = [sys.executable, "-m", "scaling.ranks", str(store.port), str(rank), str(size)]
            # Its standard input ends when this process does, however that ends.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log)
            self._others.append((process, log))
        while not store.check([_here(rank) for rank in range(1, size)]):
            if any(process.poll() is not None for process, _ in self._others):
                raise RuntimeError("a rank ended before the ranks met")
            time.sleep(POLL_S)
        return _meet(store, 0, size)

    def _last_words(self) -> str | None:
        """What is known of a rank that has ended, or None when all live, or are torchrun's."""
        if not self._others:
            return None
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            for rank, (process, log) in enumerate(self._others, start=1):
                if process.poll() is not None:
                    log.seek(0)
                    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
                    said = f": {lines[-1].strip()}" if lines else ""
                    return f"rank {rank} of {len(self._others) + 1} died (exit code {process.returncode}){said}"
            time.sleep(0.05)
        return None

    def _dismiss(self) -> None:
        for process, log in self._others:
            process.kill()
            process.wait()
            assert process.stdin is not None, "it was started with a pipe"
            process.stdin.close()
            log.close()
        self._others.clear()
        if self._group is not None:
            self._group = None
            _ended.append(dist.group.WORLD)
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def _lost_a_rank(error: RuntimeError) -> bool:
    """Whether torch says that a connection to another process has ended; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def _a_lost_rank_said() -> Iterator[None]:
    """In one of torchrun's ranks: that another has ended is said as such. Raises Interrupted then."""
    try:
        yield
    except RuntimeError as error:
        if not _lost_a_rank(error):
            raise
        cure = "torchrun --max-restarts N starts all again; the run then goes on from its last checkpoint"
        raise Interrupted(Fault("torchrun", f"another rank is gone: {str(error).partition('. ')[0]}", cure)) from error


def _here(rank: int) -> str:
    """Key under which a rank says that it is up."""
    return f"here/{rank}"


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _meet(store: TCPStore, rank: int, size: int) -> Group:
    """The group of processes of this machine."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if before is None and sys.platform == "linux":
        # Else gloo looks the machine's name up, which not every machine can do.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=size, timeout=PATIENCE)
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
    note_group(size)
    return Group(rank, size, rank)


def join() -> Group:
    """The group that torchrun describes in the environment."""
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    with _ended_by_sigterm():
        # Keys of an attempt that was killed are left in the store, which outlives it: each attempt has a name of its own.
        store = PrefixStore(agree_on_attempt(store, rank, size), store)
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=size, timeout=PATIENCE)
    note_group(size)
    return Group(rank, size, int(os.environ.get("LOCAL_RANK", "0")))


def agree_on_attempt(store: Store, rank: int, size: int) -> str:
    """A name that rank 0 has made and that all living ranks, and they alone, are told. torchrun's count of restarts is each machine's own.

    The others ask under a name which no rank before them had, so that an answer can come only from a rank 0 that lives.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"asks/{rank}", own)
        while not store.check([f"answer/{own}"]):
            time.sleep(POLL_S)
        attempt: str = store.get(f"answer/{own}").decode()
        store.set(f"{attempt}/{rank}", "")
        return attempt
    others = range(1, size)
    # What it reads first may be what a rank that is dead asked.
    while not store.check([f"{own}/{other}" for other in others]):
        for other in others:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        time.sleep(POLL_S)
    return own


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """torchrun's SIGTERM ends the process at once: in the middle of gloo's C++ no handler of Python's would run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def follow(group: Group) -> None:
    """What a rank other than 0 does: as it is told, until rank 0 ends or is gone."""
    from scaling.data import prepare
    from scaling.train import Trainer

    trainer: Trainer | None = None
    while True:
        order, argument = group.told()
        if trainer is not None and order in ("train", "end"):
            trainer.written()
        if order == "end":
            return
        if order == "train":
            run: RunConfig = argument
            corpus = prepare(run.data, context=run.model.context, vocab_size=run.model.vocab_size)
            trainer = Trainer(run, corpus, group)
            continue
        assert trainer is not None, "rank 0 says first what is trained"
        if order == "load":
            trainer.load_state_dict(argument)
        elif order == "step":
            trainer.step(argument)
        elif order == "validate":
            trainer.validate()
        elif order == "save":
            trainer.save_shards(argument)
        elif order == "load_shards":
            trainer.load_shards(argument)
        else:
            trainer.process_s()


def follow_torchrun() -> NoReturn:
    """`follow` in a process of torchrun's, which ends with it. Raises Interrupted when another of them is gone."""
    with _a_lost_rank_said():
        follow(join())
    leave(0)


def _end_with_leader() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _main(port: str, rank: str, size: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group of processes; rank 0 decides.
    threading.Thread(target=_end_with_leader, daemon=True).start()
    store = TCPStore("127.0.0.1", int(port), int(size), is_master=False, wait_for_workers=False)
    store.set(_here(int(rank)), "")
    follow(_meet(store, int(rank), int(size)))
    leave(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
