"""TransferQueue as it moves a batch from four workers to four workers: a peer of ``benchmarks.data_plane``.

TransferQueue (Apache-2.0, https://pypi.org/project/TransferQueue) is the data plane that verl offers. Here it has the
faster of its ways to hold rows of different lengths, jagged nested tensors, and a storage process for each worker. Each
worker puts its quarter of the batch, and then each gets the rows of the next worker and reads every value.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.plain_batches import checksum
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.connection import environment, private_ray

_PACKAGES = ("TransferQueue==0.1.11", "tensordict>=0.15,<0.16", "pyvers", "orjson")
# Its wheel has top-level packages called ``tests`` and ``scripts``, so it does not belong into an environment.
_FOLDER = Path(sys.prefix) / "benchmark_peers"


class QueueWorker:
    """A worker's part of the batch, row by row, as an engine has generated it."""

    def __init__(self, keys: Sequence[str], rows: Mapping[str, Sequence[NDArray[Any]]]) -> None:
        self._keys, self._rows = keys, rows

    def connect(self) -> None:
        import_module("transfer_queue").init()

    def put(self, partition: str) -> None:
        torch = import_module("torch")
        fields = {
            name: torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)
            for name, rows in self._rows.items()
        }
        batch = import_module("tensordict").TensorDict(fields, batch_size=len(self._keys))
        import_module("transfer_queue").kv_batch_put(keys=list(self._keys), partition_id=partition, fields=batch)

    def read(self, partition: str, keys: Sequence[str]) -> int:
        """Return a checksum over every value of the rows with these keys."""
        batch = import_module("transfer_queue").kv_batch_get(keys=list(keys), partition_id=partition)
        return int(np.bitwise_xor.reduce([checksum(batch[name].values().numpy()) for name in self._rows]))


class TransferQueue:
    """A running TransferQueue and its workers."""

    def __init__(self, parts: Sequence[QueueWorker], keys: Sequence[Sequence[str]]) -> None:
        """Connect a process for each part; ``keys`` are those of each part."""
        ray = import_ray()
        remote = ray.remote(ObjectProcess).options(num_cpus=0)
        self._keys = keys
        self._actors = [remote.remote() for _ in parts]
        pairs = zip(self._actors, parts, strict=True)
        ray.get([actor.load_object.remote(ray.cloudpickle.dumps(part)) for actor, part in pairs])
        ray.get([actor.call.remote("connect") for actor in self._actors])
        self._step = 0

    def move(self) -> int:
        """Move the batch once and return its checksum."""
        ray, partition = import_ray(), f"step-{self._step}"
        self._step += 1
        ray.get([actor.call.remote("put", partition) for actor in self._actors])
        wanted = [*self._keys[1:], self._keys[0]]
        sums = [actor.call.remote("read", partition, keys) for actor, keys in zip(self._actors, wanted, strict=True)]
        return int(np.bitwise_xor.reduce(ray.get(sums)))

    def clear(self) -> None:
        """Drop what was moved, which is not part of its time."""
        keys = [key for part in self._keys for key in part]
        import_module("transfer_queue").kv_clear(keys=keys, partition_id=f"step-{self._step - 1}")


@contextmanager
def transfer_queue(num_workers: int, store_bytes: int) -> Iterator[None]:
    """Run TransferQueue in a Ray of its own, whose hosts have the CPUs that its storage processes reserve."""
    if not _FOLDER.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(_FOLDER)]
        subprocess.run([*command, *_PACKAGES], check=True, timeout=600)
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    ray, configuration = import_ray(), import_module("omegaconf").OmegaConf
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(_FOLDER)])
    with private_ray(), environment({"PYTHONPATH": path}):
        ray.init(
            num_cpus=2 * num_workers,
            object_store_memory=store_bytes,
            include_dashboard=False,
            logging_level="error",
            log_to_driver=False,
        )
        try:
            queue = import_module("transfer_queue")
            queue.init(configuration.create({"backend": {"SimpleStorage": {"num_data_storage_units": num_workers}}}))
            yield
            queue.close()
        finally:
            ray.shutdown()
