"""checkpoint -> engine, top to bottom. Each step is one call; nothing calls back into an earlier one."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ..runtime.drivers.cpu.host import host_features
from ..runtime.errors import BuildError, CheckpointError, EngineFormatError, NoKernelError
from ..runtime.format.container import EngineWriter
from ..runtime.format.manifest import SCHEMA, Manifest, TargetEntry, decode_manifest, encode_manifest
from ..runtime.format.plan import Ranges, encode_plan
from ..runtime.format.refit import WEIGHTS, encode_expressions
from ..runtime.format.tensor_type import TensorType
from ..runtime.format.weight_eval import evaluate_chunks
from ..runtime.format.weight_expr import WeightExpr
from ..runtime.version import VERSION
from .autotune import Tuner, Tuning
from .checkpoint import Checkpoint
from .codegen.cache import ObjectCache
from .codegen.cpu import compile_cpu, compiler_version
from .golden import golden_vectors
from .graph import Graph, Node
from .importer import import_graph
from .kernels import KernelCall, KernelRegistry
from .lower import Lowered, lower
from .machine import this_machine
from .model_info import max_positions, model_info
from .options import BuildOptions
from .oracle.kernels import REFERENCE_KERNELS
from .output import check_output, report_path
from .passes import pack_weights
from .passes.pack_weights import Reads
from .passes.pipeline import PassOptions, optimize
from .progress import BuildProgress
from .report import TargetBuild, build_report, write_timings
from .target import Target, resolve_targets
from .timing_cache import TimingCache
from .tokenizer_closure import close_tokenizer
from .trace import trace

#: Room for golden vectors in the file (they are computed after the file's layout is fixed).
GOLDEN_BYTES = 16 << 10


@dataclass(frozen=True)
class BuildResult:
    """Where the engine is and what it took."""

    path: Path
    bytes: int
    seconds: float
    targets: tuple[str, ...]
    notes: tuple[str, ...]  # the engine's own, then how its tactics were chosen


def build(
    checkpoint_path: str | Path,
    out: str | Path,
    options: BuildOptions,
    registry: KernelRegistry,
    progress: BuildProgress | None = None,
) -> BuildResult:
    """Build an engine file from a checkpoint (a Hugging Face folder or a GGUF file).

    ``out`` appears only when everything has worked; an older file of that name stays until then.
    Raises the typed errors of runtime/errors.py; see docs/architecture.md for the way through the layers.
    """
    out = Path(out)
    check_output(out, Path(checkpoint_path))
    targets = resolve_targets(options.targets)
    tuner = _tuner(options, out)
    with progress or BuildProgress(quiet=True) as bar:
        with bar.stage("read checkpoint"):
            checkpoint = Checkpoint.open(checkpoint_path, trust_remote_code=options.trust_remote_code)
            ranges = options.ranges(max_positions(checkpoint.config))
        with bar.stage("trace"):
            traced = trace(checkpoint, max_seq_len=ranges.max_seq_len)
        with bar.stage("import"):
            graph = import_graph(traced, checkpoint)
        with bar.stage("optimise"):
            precision = options.precision(checkpoint.dtype)
            reads = _reads(targets, registry, ranges) if options.weight_packing == "auto" else None
            passes = PassOptions(precision, ranges, options.dump_ir, options.verify, checkpoint.source, reads)
            graph = optimize(graph, passes)
        builds: list[TargetBuild] = []
        code: dict[str, bytes] = {}
        for target in targets:
            built = _lower(graph, target, _registry_for(target, registry), ranges, tuner, bar)
            builds.append(built)
            with bar.stage(f"compile {target}") as stage:
                if target.sku is not None:
                    code[str(target)] = _compile(built.lowered, target, options)
                    stage.bytes = len(code[str(target)])
        lowered = {str(built.target): built.lowered for built in builds}
        with bar.stage("tokenizer"):
            tokenizer = close_tokenizer(checkpoint.path) if checkpoint.tokenizer_files else None
        with bar.stage("hash checkpoint"):
            provenance = _provenance(checkpoint, options)

        notes = [*checkpoint.notes, *traced.notes]
        if tokenizer is None:
            notes.append("the checkpoint has no tokenizer: the engine takes and gives token ids only")
        notes += _generic_notes(lowered)
        if options.weight_packing == "auto":
            notes += filter(None, [pack_weights.note(graph)])
        info = model_info(checkpoint, tokenizer, precision, ranges.max_seq_len)
        manifest = Manifest(
            schema=SCHEMA,
            pelton_version=VERSION,
            model=info,
            ranges=ranges,
            targets=tuple(_entry(t, options) for t in targets),
            provenance=provenance,
            notes=tuple(notes),
        )
        _check_readable(manifest, checkpoint)
        sections = _sections(lowered, code, tokenizer, build_report(builds, notes))
        _write(out, manifest, sections, lowered, checkpoint, graph, options, bar)
        size = out.stat().st_size
        seconds = write_timings(out, bar.stages, size, builds)
    notes += [note for built in builds for note in built.tuning.notes]
    return BuildResult(out, size, seconds, tuple(map(str, targets)), tuple(notes))


def _registry_for(target: Target, registry: KernelRegistry) -> KernelRegistry:
    return registry if target.sku is not None else KernelRegistry(REFERENCE_KERNELS)


def _reads(targets: Sequence[Target], registry: KernelRegistry, ranges: Ranges) -> Reads:
    """Whether every target has a kernel for a node with other operand types than its own."""

    def reads(node: Node, types: Sequence[TensorType]) -> bool:
        call = KernelCall(node.op, tuple(types), tuple(v.type for v in node.outputs), (), ranges)
        try:
            for target in targets:
                _registry_for(target, registry).select(call, target)
        except NoKernelError:
            return False
        return True

    return reads


def _tuner(options: BuildOptions, out: Path) -> Tuner | None:
    """What chooses tactics, if anything but the kernels' own models does. Raises TimingCacheError."""
    if not options.autotune and options.timing_cache is None:
        return None
    cache = None
    if options.timing_cache is not None:
        if options.timing_cache.absolute() in (out.absolute(), report_path(out).absolute()):
            raise BuildError(f"--timing-cache {options.timing_cache} is a file that this build writes; name another")
        cache = TimingCache.open(options.timing_cache, create=options.autotune)
    timer = None
    if options.autotune:
        from .tactic_timer import TacticTimer  # needs the native module, which plain builds do without

        timer = TacticTimer(options.compiler, options.cache_dir, options.num_jobs)
    return Tuner(timer, cache, this_machine(), host_features())


def _lower(
    graph: Graph, target: Target, registry: KernelRegistry, ranges: Ranges, tuner: Tuner | None, bar: BuildProgress
) -> TargetBuild:
    """The target's plan; with a tuner, of kernels with the tactics that it chose."""
    low = lower(graph, target, registry, ranges)
    if tuner is None or target.sku is None:
        return TargetBuild(target, registry, low, Tuning())
    with bar.stage(f"tactics {target}", len(low.emitted)):
        tuning = tuner.tune(low.emitted, target, lambda: bar.advance(1))
    # Scratch depends on tactics, so buffers are placed anew.
    return TargetBuild(target, registry, lower(graph, target, registry.choosing(tuning.preferred()), ranges), tuning)


def _compile(low: Lowered, target: Target, options: BuildOptions) -> bytes:
    if target.sku is None:
        raise BuildError(f"target {target} has no code to compile")
    sources = [(symbol, kernel.emit(call, target, symbol)) for symbol, kernel, call in low.emitted]
    cache = ObjectCache(options.cache_dir)
    return compile_cpu(sources, target.sku, compiler=options.compiler, cache=cache, jobs=options.num_jobs)


def _entry(target: Target, options: BuildOptions) -> TargetEntry:
    sku = target.sku
    return TargetEntry(
        key=str(target),
        kind=target.kind,
        sku=sku.name if sku else "",
        features=sku.features if sku else (),
        rank=sku.rank if sku else 0,
        compiler=compiler_version(options.compiler) if sku else "",
        flags=sku.compiler_flags if sku else (),
    )


def _provenance(checkpoint: Checkpoint, options: BuildOptions) -> dict[str, str]:
    """What an operator needs to know where an engine came from. No times, no machine paths: same input, same bytes."""
    import torch
    import transformers

    return {
        "checkpoint": checkpoint.name,
        "checkpoint_hash": checkpoint.fingerprint(),
        "dtype_option": options.dtype,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "weight_packing": options.weight_packing,
    }


def _check_readable(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """The bounds of a manifest's fields hold only for a reader, so read it before anything is written."""
    try:
        decode_manifest(encode_manifest(manifest))
    except EngineFormatError as error:
        raise CheckpointError(f"{checkpoint.path}: a config says what no engine can hold: {error}") from error


def _generic_notes(lowered: dict[str, Lowered]) -> list[str]:
    """A line for each op that no fused kernel took: it runs, slower, and the report says so."""
    counts: Counter[tuple[str, str]] = Counter()
    for key, low in lowered.items():
        generic = {symbol: kernel.name for symbol, kernel, _ in low.emitted if kernel.generic}
        for launch in low.plan.launches:
            name = generic.get(low.plan.kernels[launch.kernel].symbol)
            if name is not None:
                counts[key, name] += 1
    return [f"{key}: {n} launches of the generic kernel {name}" for (key, name), n in sorted(counts.items())]


def _sections(
    lowered: dict[str, Lowered], code: dict[str, bytes], tokenizer: bytes | None, report: dict[str, object]
) -> dict[str, bytes]:
    sections = {f"plan/{key}": encode_plan(low.plan) for key, low in lowered.items()}
    sections |= {f"code/{key}": data for key, data in code.items()}
    if tokenizer is not None:
        sections["tokenizer"] = tokenizer
    sections["report"] = msgspec.json.encode(report, order="deterministic")
    return sections


def _write(
    out: Path,
    manifest: Manifest,
    sections: dict[str, bytes],
    lowered: dict[str, Lowered],
    checkpoint: Checkpoint,
    graph: Graph,
    options: BuildOptions,
    bar: BuildProgress,
) -> None:
    """Stream the weights and close the file. All targets name the same canonical tensors, stored once."""
    tensors = {spec.name: (spec, origin) for low in lowered.values() for spec, origin in low.tensors}
    specs = [spec for spec, _ in tensors.values()]
    weights = {name: origin for name, (_, origin) in tensors.items() if not isinstance(origin, np.ndarray)}
    sections[WEIGHTS] = encode_expressions(weights)
    reserve = {"golden": GOLDEN_BYTES} if options.golden else {}
    total = float(sum(spec.nbytes for spec in specs))
    with ExitStack() as closing:
        writer = closing.enter_context(EngineWriter(out, manifest, specs, sections, reserve))
        with bar.stage("weights", total) as stage:
            for spec, origin in tensors.values():
                writer.write_tensor(spec.name, _counted(_chunks(origin, checkpoint), bar))
                stage.bytes += spec.nbytes
        if options.golden:
            with bar.stage("golden vectors"):
                writer.fill("golden", golden_vectors(graph, writer.reader(), manifest.ranges))
        with bar.stage("hash and close"):
            closing.close()


def _chunks(origin: WeightExpr | np.ndarray, checkpoint: Checkpoint) -> Iterator[np.ndarray]:
    if isinstance(origin, np.ndarray):
        yield origin
    else:
        yield from evaluate_chunks(origin, checkpoint.source)


def _counted(chunks: Iterator[np.ndarray], bar: BuildProgress) -> Iterator[np.ndarray]:
    for chunk in chunks:
        yield chunk
        bar.advance(chunk.nbytes)
