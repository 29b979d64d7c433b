"""Evaluate kestrel-tiny through the engine, from encoded files, on the frozen scenes.

    python -m training.evaluate --scenes 2000 --unseen 300 --out out/evaluation

The output folder keeps finished scenes, so an interrupted run continues where it stopped. --processes distributes the
scenes over engines of one thread each. The run ends with the table and table.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kestrel_grpc.scenes.evaluation_set import Example, Task, encode, example
from kestrel_grpc.scenes.scoring import Record, score
from training.score_table import tabulate

BUNDLED = Path(__file__).parents[1] / "kestrel_engine" / "bundled" / "kestrel_tiny"
GREEDY = {"temperature": 0.0}


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--scenes", type=int, default=2000, help="scenes of the main slice")
    p.add_argument(
        "--unseen",
        type=int,
        default=300,
        help="scenes with pairs of colour and shape that training never shows",
    )
    p.add_argument("--model", type=Path, default=BUNDLED, help="folder of the model")
    p.add_argument("--out", type=Path, default=Path("out/evaluation"), help="folder of the records")
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--shard", default="0/1", help="i/n: only every n-th scene from the i-th on")
    p.add_argument("--device", default="cpu")
    p.add_argument(
        "--threads", type=int, default=0, help="torch threads a process; 0: 1 if several, else all"
    )
    p.add_argument("--failures", type=int, default=0, help="print this many wrong answers")
    return p.parse_args()


async def ask(engine: Any, image: bytes, task: Task) -> dict[str, Any]:
    """The engine's output for one task, greedily."""
    refs = [list(r) for r in task.refs] or None
    if task.skill in ("query", "reasoning"):
        reasoning = task.skill == "reasoning"
        result = await engine.query(
            image, task.text, reasoning=reasoning, spatial_refs=refs, settings=GREEDY
        )
    elif task.skill == "caption":
        result = await engine.caption(image, task.text, settings=GREEDY)
    else:
        result = await getattr(engine, task.skill)(image, task.text, settings=GREEDY)
    return dict(result.output)


async def run_example(engine: Any, found: Example) -> list[Record]:
    image = encode(found)
    outputs = await asyncio.gather(*(ask(engine, image, task) for task in found.tasks))
    view = found.scene.view
    common = {"slice": found.slice, "index": found.index, "tiling": f"{view.rows}x{view.columns}"}
    return [
        {**common, **score(found.scene, task, output)}
        for task, output in zip(found.tasks, outputs, strict=True)
    ]


def wanted_scenes(args: argparse.Namespace) -> list[tuple[str, int]]:
    scenes = [("seen", i) for i in range(args.scenes)] + [
        ("unseen-pairs", i) for i in range(args.unseen)
    ]
    shard, shards = map(int, args.shard.split("/"))
    return scenes[shard::shards]


def read_records(folder: Path) -> list[Record]:
    """All finished scenes' records; a line cut short by an interruption is left out."""
    records: list[Record] = []
    done: set[tuple[str, int]] = set()
    for path in sorted(folder.glob("records*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                scene = json.loads(line)
            except ValueError:
                continue
            key = (scene["slice"], scene["index"])
            if key not in done:
                done.add(key)
                records += scene["records"]
    return records


async def run_shard(args: argparse.Namespace) -> None:
    import torch

    from kestrel_engine import InferenceEngine, RuntimeConfig

    shards = int(args.shard.split("/")[1])
    threads = args.threads or (1 if shards > 1 else 0)
    if threads:
        torch.set_num_threads(threads)
    done = {(r["slice"], r["index"]) for r in read_records(args.out)}
    todo = [scene for scene in wanted_scenes(args) if scene not in done]
    config = RuntimeConfig(
        model_path=args.model,
        device=args.device,
        dtype="float32",
        max_batch_size=16,
        cpu_threads=threads or None,
    )
    engine = await InferenceEngine.create(config)
    began = time.monotonic()
    path = args.out / f"records-{args.shard.replace('/', '-of-')}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for number, (name, index) in enumerate(todo, start=1):
            records = await run_example(engine, example(name, index))
            file.write(json.dumps({"slice": name, "index": index, "records": records}) + "\n")
            file.flush()
            if number % 20 == 0 or number == len(todo):
                spent = time.monotonic() - began
                left = spent / number * (len(todo) - number)
                print(
                    f"shard {args.shard}: {number} of {len(todo)} scenes, {left:.0f} s left",
                    flush=True,
                )
    await engine.shutdown()


def run_processes(args: argparse.Namespace) -> None:
    """The same command once per shard."""
    base = [
        sys.executable, "-m", "training.evaluate", "--scenes", str(args.scenes), "--unseen", str(args.unseen),
        "--model", str(args.model), "--out", str(args.out), "--device", args.device,
    ]  # fmt: skip
    running = [
        subprocess.Popen(
            [*base, "--shard", f"{i}/{args.processes}", "--threads", str(args.threads or 1)]
        )
        for i in range(args.processes)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(
            f"{sum(1 for c in codes if c)} of {len(codes)} processes failed; run again to go on"
        )


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.processes > 1:
        run_processes(args)
    else:
        asyncio.run(run_shard(args))
    if args.processes == 1 and not args.shard.endswith("/1"):
        return  # The parent process prints the table of all shards.
    records = read_records(args.out)
    table = tabulate(records)
    (args.out / "table.json").write_text(
        json.dumps(table.as_json(), indent=1) + "\n", encoding="utf-8"
    )
    (args.out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    for record in [r for r in records if not r["ok"]][: args.failures]:
        print({k: v for k, v in record.items() if k != "ok"})


if __name__ == "__main__":
    main()
