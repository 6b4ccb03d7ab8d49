"""A run with all trackers that is killed and resumed; then each tracker's own library reads it back.

This is a program, because it refuses every connection to another machine, and its libraries print many warnings. It
writes the values from the trackers as JSON to ``read.json`` in the working directory.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CONNECTS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0}
"""The audit events of Python that open connections, each with the position of the address in its arguments."""
outgoing: list[str] = []
Points = list[tuple[int, str, float]]


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in CONNECTS:
        address = arguments[CONNECTS[event]]
        host = address[0] if isinstance(address, tuple) else address
        is_path = not isinstance(address, tuple) and event != "socket.getaddrinfo"
        if host and not is_path and host not in LOOPBACK:
            outgoing.append(f"{event} {address}")
            raise OSError(f"{address} is on another machine")


def run(folder: Path) -> None:
    import rlflow
    from tests.conftest import CONFIG_DIR
    from tests.helpers import load

    class Killed(rlflow.Observer):
        def stepped(self, step: int, metrics: Any) -> None:
            if step == 3:
                raise KeyboardInterrupt

    recipe = load(
        *("recipe=fake", "steps=4", "checkpoints.every=2", "evaluation={every: 2, num_prompts: 4, num_responses: 2}"),
        "trackers=[tensorboard,wandb,mlflow,trackio,swanlab]",
        "graph.rewards.function='tests.integration.reward_functions:length'",
        config_dir=CONFIG_DIR,
    )
    plan = rlflow.compile(recipe, "local")
    try:
        rlflow.run(plan, folder, observers=[Killed()])
    except KeyboardInterrupt:
        rlflow.run(plan, resume=folder, observers=())


def read_tensorboard(folder: Path) -> tuple[Points, int | None, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    text = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    points = [(point.step, name, point.value) for name in events.Tags()["scalars"] for point in events.Scalars(name)]
    return points, None, int(re.findall(r"^steps: (\d+)", text, flags=re.MULTILINE)[0])


def read_wandb(folder: Path) -> tuple[Points, int, Any]:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    points, tables, ids = [], 0, set()
    config: dict[str, Any] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for content in _scan(WBDataStoreReader(), path):
            record = Record.FromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            tables += any(name.startswith("samples") for name in row)
            metrics = {name: row[name] for name in row if not name.startswith(("_", "samples"))}
            points += [(row["_step"], name, value) for name, value in metrics.items()]
    assert len(ids) == 1
    return points, tables, config["steps"]


def read_mlflow(folder: Path) -> tuple[Points, int, Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("rlflow")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    table = client.load_table(experiment.experiment_id, "samples.json", [found.info.run_id])
    points = [(point.step, name, point.value) for name, history in histories.items() for point in history]
    return points, len(set(table["step"])), int(found.data.params["steps"])


def read_trackio(folder: Path) -> tuple[Points, int, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (found,) = trackio.Api().runs("rlflow")
    logs = SQLiteStorage.get_logs("rlflow", found.name, run_id=found.id)
    points = [
        (log["step"], name, log[name]) for log in logs for name in log if name not in ("step", "timestamp", "samples")
    ]
    assert found.config is not None
    return points, sum("samples" in log for log in logs), found.config["steps"]


def read_swanlab(folder: Path) -> tuple[Points, int, Any]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points, tables, ids = [], 0, set()
    for path in sorted((folder / "swanlog").glob("run-*/*.swanlab")):
        ids.add(path.name)
        for content in _scan(DataStoreReader(), path):
            record = Record.FromString(content)
            tables += record.HasField("media") and record.media.key == "samples"
            if record.HasField("scalar"):
                points.append((record.scalar.step, record.scalar.key, record.scalar.value.number))
        config = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
    assert len(ids) == 1
    return points, tables, config["steps"]["value"]


def _scan(reader: Any, path: Path) -> Iterator[bytes]:
    reader.open(path)
    while (content := reader.scan()) is not None:
        yield content
    reader.close()


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "swanlab": read_swanlab,
}

if __name__ == "__main__":
    sys.addaudithook(refuse)
    run(Path(sys.argv[1]))
    found = {name: read(Path(sys.argv[1])) for name, read in READERS.items()}
    Path("read.json").write_text(json.dumps({"found": found, "outgoing": outgoing}))
