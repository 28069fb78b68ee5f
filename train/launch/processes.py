"""Joins several processes that train one model: their numbers, the start of jax, and values that they agree on.

Each process runs `bytescope train` with its own devices; jax joins the devices into one mesh. Process 0 writes the run
directory and prints. Every process reads its own rows of the data and writes its own shards of a checkpoint.
"""

import argparse
import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from bytescope.memory import environment
from bytescope.memory.commands.arguments import INTERRUPTED
from bytescope.train.launch.liveness import Link
from bytescope.train.launch.rendezvous import LOOPBACK, Token, meet
from bytescope.train.launch.signals import leave_at_once
from bytescope.train.user_errors import UserError

# A launcher that jax can detect sets one of these. Without them jax is not asked, which takes seconds on some machines.
LAUNCHERS = (
    "SLURM_STEP_NODELIST",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_COMM_WORLD_SIZE",
    "JOB_COMPLETION_INDEX",
    "TPU_PROCESS_ADDRESSES",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS",
)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # only on Linux
FLAGS = ("coordinator", "process", "processes")
LONGEST_S = 10**6  # maximum seconds to wait until other processes connect or continue: eleven days
NEWS_S = 5.0  # seconds that an error waits for the message that another process caused it


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of process 0, and the number of this process.

    Fields:
      host, port: where process 0 listens.
      index: number of this process, from 0.
      count: number of processes.
      launched: True if a launcher such as SLURM gave the address.
    """

    host: str
    port: int
    index: int
    count: int
    launched: bool

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a multi-process run to `parser`."""
    group = parser.add_argument_group("several processes (detected under SLURM and Open MPI)")
    group.add_argument("--coordinator", metavar="H:P", help="host:port of process 0, the same for all processes")
    group.add_argument("--process", type=int, metavar="I", help="number of this process, from 0 to --processes minus 1")
    group.add_argument("--processes", type=int, metavar="N", help="number of processes of the run")
    group.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="maximum seconds to wait for all to start (default %(default)g)",
    )


def find(args: argparse.Namespace) -> Address | None:
    """Returns the address of process 0 and this process's number, from the flags or from a launcher's environment.
    Returns None for a run of one process.

    Raises:
      UserError: flags that cannot be combined, or a launcher's environment that cannot be read.
    """
    if not 0 < args.timeout <= LONGEST_S:  # nor nan
        raise UserError(
            f"--timeout={args.timeout:g} is out of range: give a positive number of seconds, at most {LONGEST_S}"
        )
    given = {name: getattr(args, name) for name in FLAGS}
    if given == {"coordinator": None, "process": None, "processes": 1}:
        return None
    missing = [f"--{name}" for name in FLAGS if given[name] is None]
    if missing:
        if len(missing) < len(FLAGS):
            raise UserError(
                f"the flags {' and '.join(missing)} are missing: give --coordinator, --process, --processes together"
            )
        return _launched(args.timeout)
    host, port = _host_port(args.coordinator)
    if args.processes < 1 or not 0 <= args.process < args.processes:
        raise UserError(
            f"--process={args.process} is not valid with --processes={args.processes}: give process numbers from 0 to "
            "one less than --processes"
        )
    return Address(host, port, args.process, args.processes, False) if args.processes > 1 else None


def _host_port(text: str) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{text}")
        host, port = url.hostname, url.port
    except ValueError:  # the port is out of range, or the brackets have no IPv6 address
        host = port = None
    if not host or not port or url.path or url.username:
        raise UserError(
            f"--coordinator={text} is not an address: give HOST:PORT, such as node1:4567, or [ADDRESS]:PORT for IPv6"
        )
    return host, port


def _launched(timeout: float) -> Address | None:
    if not any(map(environment.text, LAUNCHERS)):
        return None
    from jax._src.clusters import ClusterEnv  # the detection of jax.distributed.initialize, which returns nothing

    try:
        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(timeout)
        )
    except Exception as error:  # whatever a launcher's environment lacks
        raise UserError(
            f"the launcher's environment cannot be read ({error}): give --coordinator, --process and --processes"
        ) from error
    if address is None or count is None or index is None or count == 1:
        return None
    return Address(*_host_port(address), index, count, True)


class Processes:
    """The processes of a run, as seen by one process.

    Args:
      index: number of this process, from 0.
      count: number of processes.
      link: the connections to the other processes; None if the run has only this process.
    """

    def __init__(self, index: int = 0, count: int = 1, link: Link | None = None):
        self.index, self.count, self._link = index, count, link

    @property
    def first(self) -> bool:
        """True for process 0, which writes the run directory and prints."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Returns a list with the `value` of every process, in order of process number. All processes must call it, in
        the same order. Values are JSON values."""
        return [value] if self._link is None else self._link.gather(value)

    def from_first(self, value: Any) -> Any:
        """Returns the `value` of process 0, a JSON value. All processes must call it, in the same order."""
        return self.gather(value if self.first else None)[0]

    def on_this_node(self) -> int:
        """Returns the number of processes of the run on this node, itself included: those with the same host name and
        start of the operating system. All processes must call it, in the same order."""
        node = [socket.gethostname(), BOOT_ID.read_text() if BOOT_ID.exists() else ""]
        return self.gather(node).count(node)

    def at(self, doing: str) -> None:
        """Records that this process makes progress, and its current activity, such as "in step 12".

        `doing`: the activity; "" if no other process can be waiting for this one.
        """
        if self._link is not None:
            self._link.stalls.at(doing)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context manager in which an error of one process ends all processes, with the exit code of the error.

        Clean-up code outside the context must not wait for other processes, because they may have ended.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if self._link is None:
                raise
            if isinstance(error, UserError):
                self._link.fail(error.exit_code, "\n".join([str(error), *getattr(error, "advice", ())]))
            if isinstance(error, KeyboardInterrupt):
                self._link.fail(INTERRUPTED, "interrupted")
            # A collective fails when another process dies. Then the death is the error to print.
            self._link.settle(NEWS_S)
            import traceback

            traceback.print_exc()
            self._link.fail(1, " ".join(f"{type(error).__name__}: {error}".split())[:300])

    def interrupt(self, note: str) -> NoReturn:
        """Prints `note` and ends all processes of the run immediately."""
        if self._link is None:
            leave_at_once(note)
        self._link.fail(INTERRUPTED, note)

    def close(self) -> None:
        """Waits until all processes have finished, then closes the connections."""
        if self._link is None:
            return
        import jax

        self.gather(None)
        jax.distributed.shutdown()
        self._link.close()


ALONE = Processes()


def start(address: Address | None, args: argparse.Namespace, stall_timeout: float) -> Processes:
    """Connects this process with the other processes of the run. Call it before jax starts a backend.

    Args:
      address: the result of `find(args)`; None for a run of one process.
      args: the parsed flags of `add_flags`.
      stall_timeout: seconds without progress after which a line names the straggler, or 0 for never. A process that
        sends no messages is named after a quarter of that time. A suspended process does not end the run.

    Raises:
      UserError: the port is already in use.
      Lost: not all processes connected in time.
    """
    if address is None:
        return ALONE
    peers = meet(
        address.host, address.port, address.index, address.count, args.timeout, Token(args.workdir, address.port)
    )
    link = Link(address.index, address.count, peers, stall_timeout=stall_timeout)
    processes = Processes(address.index, address.count, link)
    with processes.together():
        _start_jax(address, args.timeout)
    return processes


def _start_jax(address: Address, timeout: float) -> None:
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM itself
    # jax's heartbeat would abort all processes when one of them is stopped for 100 seconds. The link finds what the
    # heartbeat finds, a dead process or a lost machine (rendezvous.KEEPALIVE), and Stalls names a stopped process.
    # jax's coordinator admits every client, so it listens only on this machine if all processes are on it.
    own = LOOPBACK.get(address.host)
    jax.distributed.initialize(
        str(address),
        address.count,
        address.index,
        initialization_timeout=int(max(timeout, 60)),
        heartbeat_timeout_seconds=LONGEST_S,
        coordinator_bind_address=str(dataclasses.replace(address, host=own)) if own else None,
        cluster_detection_method=None if address.launched else "deactivate",
    )
