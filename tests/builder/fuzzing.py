"""Fuzzers of what the builder reads: IR text, and safetensors headers of a checkpoint. For scripts/fuzz."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from pelton.builder.safetensors_source import SafetensorsSource
from pelton.builder.text import print_graph
from pelton.builder.text_parser import parse_graph
from pelton.runtime.errors import CheckpointError, GraphError

GOLDEN_IR = Path(__file__).parents[1] / "golden" / "ir"


def ir_text(random: Random, folder: Path) -> None:
    """Lines and pieces of a real graph, moved, doubled and damaged: GraphError, or a graph that prints and parses."""
    lines = random.choice(sorted(GOLDEN_IR.glob("*.txt"))).read_text().splitlines()
    for _ in range(random.randrange(1, 6)):
        at, other = random.randrange(len(lines)), random.randrange(len(lines))
        match random.randrange(4):
            case 0:
                del lines[at : at + random.randrange(1, 4)]
            case 1:
                lines[at:at] = lines[other : other + 2]
            case 2:
                cut, end = sorted(random.randrange(len(lines[at]) + 1) for _ in range(2))
                lines[at] = lines[at][:cut] + lines[at][end:]
            case _:
                cut = random.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:cut] + random.choice(' %",[]{}()=:0-9.eTf@\n\x00é') + lines[at][cut:]
        if not lines:
            return
    try:
        graph = parse_graph("\n".join(lines))
    except GraphError:
        return
    text = print_graph(graph)
    if print_graph(parse_graph(text)) != text:
        raise AssertionError("the graph does not survive printing and parsing")


def safetensors_header(random: Random, folder: Path) -> None:
    """A checkpoint shard with a damaged header or a wrong length: CheckpointError, or tensors that can be read."""
    tensors = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    header = json.dumps(tensors).encode()
    data = bytearray(len(header).to_bytes(8, "little") + header + bytes(32))
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(data))
        if random.random() < 0.2:
            del data[at:]
        else:
            data[at] = random.choice((data[at] ^ (1 << random.randrange(8)), random.randrange(256), 0x39))
        if not data:
            break
    (folder / "model.safetensors").write_bytes(data)
    try:
        source = SafetensorsSource.open(folder)
        for name in source.names():
            np.asarray(source.read(name)).tobytes()
    except CheckpointError:
        pass


TARGETS: dict[str, Callable[[Random, Path], None]] = {
    "builder.ir_text": ir_text,
    "builder.safetensors_header": safetensors_header,
}
