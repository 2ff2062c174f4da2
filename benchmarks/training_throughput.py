"""Training speed of one process: this project against transformers and litgpt, same shape.

Every side trains the same Llama shape from the same weights on the same tokens: fp32, SDPA, the
same threads, fused AdamW, cross-entropy over all S positions, nothing else in the loop.  Losses
and gradient norms are compared before anything is timed.  The bound is the time that the step's
matrix products take alone, each on tensors of its own, written to memory that exists already.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import (
    MissingPeer,
    Options,
    Report,
    at_least,
    command,
    import_peer,
    interleaved,
    ratios,
    spread,
)
from models.attention import AttentionConfig
from models.config import SIZES, ModelConfig
from models.feedforward import SwiGLU
from models.flops import parameter_count, training_flops_per_token
from parallel.apply import BuildOptions
from parallel.mesh import ParallelConfig, build_mesh
from pretrain.engine import Engine, build_engine
from pretrain.objectives.causal import Causal
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import OptimizerConfig

OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, decay_embeddings=True)
TOLERANCE = 1e-4  # fp32 losses and gradient norms of different implementations


@dataclass(frozen=True)
class Shape:
    """A preset of the size ladder (or the toy) with its vocabulary, length and batch."""

    size: str
    vocabulary: int = 4096
    length: int = 256
    batch: int = 8

    @property
    def tokens(self) -> int:
        return self.length * self.batch

    def config(self) -> ModelConfig:
        sizes = {"toy": {**SIZES["1m"], "layers": 2}, **SIZES}[self.size]
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden=sizes["hidden"],
            layers=sizes["layers"],
            attention=AttentionConfig(**sizes["attention"]),
            feedforward=SwiGLU.Config(hidden=sizes["feedforward"]["hidden"]),
        )


SHAPES = {"3m": Shape("3m"), "10m": Shape("10m"), "30m": Shape("30m")}
TOY = Shape("toy", vocabulary=256, length=32, batch=2)


@dataclass
class Side:
    """One competitor: a training step, and its loss and gradient norm on the first batch."""

    step: Callable[[], object]
    check: Callable[[], tuple[float, float]]


def norm(parameters: list[Tensor]) -> float:
    return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())


def engine(config: ModelConfig, length: int, compiled: bool) -> Engine:
    parallel = ParallelConfig()
    mesh = build_mesh(parallel, torch.device("cpu"))
    return build_engine(config, parallel, mesh, BuildOptions(compile=compiled), length)


def ours(config: ModelConfig, tokens: Tensor, compiled: bool) -> Side:
    built = engine(config, tokens.shape[1] - 1, compiled)
    optimizer = ShardedOptimizer(built.model, OPTIMIZER, "torch")
    objective = Causal(Causal.Config())
    batch = [objective.micro_batch(tokens, None, range(len(tokens)))]

    def step() -> None:
        built.forward_backward(batch, objective)
        optimizer.step(OPTIMIZER.lr)

    def check() -> tuple[float, float]:
        loss = built.forward_backward(batch, objective).total
        return loss, norm([parameter for _, parameter in built.model.named_parameters()])

    return Side(step, check)


def plain_loop(
    model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor], tokens: Tensor, compiled: bool
) -> Side:
    """The loop that everybody writes: forward, cross-entropy, backward, fused AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous().flatten()

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits(model, ids).flatten(0, 1), labels)

    # The loss is compiled with the model: the best setting of a peer.
    objective = torch.compile(loss_of) if compiled else loss_of

    def backward() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = objective(ids, labels)
        loss.backward()
        return float(loss.detach())  # our step reports its loss as well

    def step() -> None:
        backward()
        optimizer.step()

    def check() -> tuple[float, float]:
        return backward(), norm(list(model.parameters()))

    return Side(step, check)


def weights(config: ModelConfig, length: int) -> dict[str, Tensor]:
    """Our initial weights, which every side starts from."""
    built = engine(config, length, compiled=False)
    return {name: p.detach().clone() for name, p in built.model.named_parameters()}


def llama(config: ModelConfig, tokens: Tensor, compiled: bool, peers: str | None) -> Side:
    transformers = import_peer("transformers", "transformers", peers)
    attention = config.attention
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.feedforward.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=attention.heads,
            num_key_value_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            max_position_embeddings=tokens.shape[1],
            rms_norm_eps=config.norm.eps,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    names = {
        "blocks.": "model.layers.",
        "attention_norm.": "input_layernorm.",
        "attention.": "self_attn.",
        "feedforward_norm.": "post_attention_layernorm.",
        "feedforward.": "mlp.",
        "embedding.": "model.embed_tokens.",
        "final_norm.": "model.norm.",
        "head.": "lm_head.",
    }
    state = {}
    for name, value in weights(config, tokens.shape[1] - 1).items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name] = value
    model.load_state_dict(state)
    return plain_loop(model, lambda m, ids: m(input_ids=ids).logits, tokens, compiled)


def litgpt(config: ModelConfig, tokens: Tensor, compiled: bool, peers: str | None) -> Side:
    module = import_peer("litgpt.model", "litgpt", peers)
    attention = config.attention
    model = module.GPT(
        module.Config(
            name="benchmark",
            block_size=tokens.shape[1] - 1,
            vocab_size=config.padded_vocab_size,
            padded_vocab_size=config.padded_vocab_size,
            n_layer=config.layers,
            n_head=attention.heads,
            n_query_groups=attention.kv_heads,
            head_size=attention.head_dim,
            n_embd=config.hidden,
            intermediate_size=config.feedforward.hidden,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.norm.eps,
            mlp_class_name="LLaMAMLP",
        )
    )
    source = weights(config, tokens.shape[1] - 1)
    state = {
        "transformer.wte.weight": source["embedding.weight"],
        "transformer.ln_f.weight": source["final_norm.weight"],
        "lm_head.weight": source["head.weight"],
    }
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        qkv = [source[f"{ours}attention.{p}_proj.weight"] for p in "qkv"]
        state[f"{theirs}attn.qkv.weight"] = torch.cat(qkv)
        for new, old in {
            "norm_1": "attention_norm",
            "attn.proj": "attention.o_proj",
            "norm_2": "feedforward_norm",
            "mlp.fc_1": "feedforward.gate_proj",
            "mlp.fc_2": "feedforward.up_proj",
            "mlp.proj": "feedforward.down_proj",
        }.items():
            state[f"{theirs}{new}.weight"] = source[f"{ours}{old}.weight"]
    model.load_state_dict(state)
    return plain_loop(model, lambda m, ids: m(ids), tokens, compiled)


def matrix_products(config: ModelConfig, tokens: int) -> tuple[Callable[[], None], float]:
    """All products with weights of one step (y, dx and dW of every linear map), and their FLOPs."""
    heads, kv, dim = (getattr(config.attention, n) for n in ("heads", "kv_heads", "head_dim"))
    hidden, inner = config.hidden, config.feedforward.hidden
    block = [(hidden, heads * dim), (hidden, kv * dim), (hidden, kv * dim), (heads * dim, hidden)]
    block += [(hidden, inner), (hidden, inner), (inner, hidden)]
    shapes = block * config.layers + [(hidden, config.padded_vocab_size)]
    products = []
    for inputs, outputs in shapes:
        x, w, g = (
            torch.randn(*s) for s in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        products += [(x, w.T, torch.empty_like(g)), (g, w, torch.empty_like(x))]
        products.append((g.T, x, torch.empty_like(w)))

    def run() -> None:
        for a, b, out in products:
            torch.mm(a, b, out=out)

    return run, float(sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b, _ in products))


def attention_products(config: ModelConfig, shape: Shape) -> Callable[[], None]:
    """The attention kernel of every layer alone, forward and backward."""
    heads, kv, dim = (getattr(config.attention, n) for n in ("heads", "kv_heads", "head_dim"))
    # As the projections leave them: [B, S, H, d], seen as [B, H, S, d].
    q, k, v = (
        torch.randn(shape.batch, shape.length, h, dim).transpose(1, 2).requires_grad_()
        for h in (heads, kv, kv)
    )
    grad = torch.randn(shape.batch, heads, shape.length, dim)

    def run() -> None:
        for _ in range(config.layers):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv)
            torch.autograd.grad(out, (q, k, v), grad)

    return run


def largest_product(size: int) -> tuple[Callable[[], None], float]:
    """A square matrix product, and its FLOPs: the most the machine does."""
    a, b, out = (torch.randn(size, size) for _ in range(3))

    def run() -> None:
        torch.mm(a, b, out=out)

    return run, 2.0 * size**3


def sides(shape: Shape, modes: list[str], options: Options, report: Report) -> dict[str, Side]:
    """Everybody who can run here, checked to compute the same thing."""
    config = shape.config()
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.length + 1)
    tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
    found: dict[str, Side] = {}
    for mode in modes:
        compiled = mode == "compiled"
        found[f"midspan {mode}"] = ours(config, tokens, compiled)
        for name, build in (("transformers", llama), ("litgpt", litgpt)):
            try:
                found[f"{name} {mode}"] = build(config, tokens, compiled, options.peers)
            except MissingPeer as missing:
                if str(missing) not in report.notes:
                    report.notes.append(str(missing))
    loss, size_of_gradient = found[f"midspan {modes[0]}"].check()
    for name, side in found.items():
        other, other_norm = side.check()
        if (
            abs(other - loss) > TOLERANCE * loss
            or abs(other_norm - size_of_gradient) > TOLERANCE * size_of_gradient
        ):
            raise ValueError(
                f"{name} computes something else: loss {other} and gradient norm {other_norm}, "
                f"here {loss} and {size_of_gradient}"
            )
    return found


def compare(label: str, shape: Shape, modes: list[str], options: Options, report: Report) -> None:
    config = shape.config()
    competitors = sides(shape, modes, options, report)
    products, product_flops = matrix_products(config, shape.tokens)
    largest, largest_flops = largest_product(256 if options.quick else 2048)
    bounds = {
        "products": products,
        "attention": attention_products(config, shape),
        "largest": largest,
    }
    steps = {name: side.step for name, side in competitors.items()}
    seconds = interleaved({**steps, **bounds}, options.repeats, warm_up=2)
    report.samples |= {f"{label} {name}": values for name, values in seconds.items()}

    bound = [a + b for a, b in zip(seconds["products"], seconds["attention"])]
    flops = training_flops_per_token(config, shape.length) * shape.tokens
    peak = largest_flops / statistics.median(seconds["largest"])
    for name in steps:
        speed = [shape.tokens / s for s in seconds[name]]
        mode = name.split()[1]
        report.rows.append(
            [
                label,
                name,
                spread(speed, 0),
                spread(ratios(seconds[name], seconds[f"midspan {mode}"])),
                spread([100 * r for r in ratios(bound, seconds[name])], 0, "%"),
                spread([100 * flops / s / peak for s in seconds[name]], 0, "%"),
            ]
        )
    report.settings[label] = (
        f"{parameter_count(config) / 1e6:.2f}M parameters, vocabulary {shape.vocabulary}, "
        f"{shape.batch} x {shape.length} tokens"
    )
    report.notes.append(
        f"{label}: products with weights alone {spread(seconds['products'], 3, 's')} at "
        f"{product_flops / statistics.median(seconds['products']) / 1e9:.0f} GFLOP/s, attention "
        f"kernels alone {spread(seconds['attention'], 3, 's')}; largest square product "
        f"{peak / 1e9:.0f} GFLOP/s"
    )
    judge(label, seconds, bound, report)


def judge(label: str, seconds: dict[str, list[float]], bound: list[float], report: Report) -> None:
    """The targets, against whichever peer is fastest in each mode."""
    for mode, least in (("eager", 1.15), ("compiled", 1.0)):
        mine = seconds.get(f"midspan {mode}")
        if mine is None:
            continue
        peers = [n for n in seconds if n.endswith(f" {mode}") and not n.startswith("midspan")]
        if peers:
            best = min(peers, key=lambda n: statistics.median(seconds[n]))
            claim = f"{label}: {mode} at least {least} times {best}"
            report.targets.append(at_least(claim, ratios(seconds[best], mine), least))
        share = [100 * r for r in ratios(bound, mine)]
        claim = f"{label}: or {mode} at least 90 % of the matrix-product bound"
        report.targets.append(at_least(claim, share, 90, 0))


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(options.threads)
    report = Report(
        "training_throughput",
        "How fast does one process train, against the same model elsewhere? Ratio: the time of a "
        "step over ours in the same mode, above 1 when we are faster. Bound: the share of the "
        "time that matrix products and attention kernels take alone. Peak: FLOPs of the model "
        "over those of the largest matrix product.",
        ["shape", "side", "tokens/s", "time / ours", "of bound", "of peak"],
        {
            "all sides": "fp32, SDPA, fused AdamW, cross-entropy over all positions, no clipping, "
            "gradients set to None, same weights and tokens (losses and gradient norms agree to "
            f"{TOLERANCE:g})",
            "compiled": "torch.compile: here every block, elsewhere model and loss together",
        },
    )
    shapes = {"toy": TOY} if options.quick else {n: SHAPES[n] for n in arguments.shapes}
    for label, shape in shapes.items():
        compare(label, shape, arguments.modes, options, report)
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["3m", "10m"], help="which (3m 10m)"
    )
    both = ["eager", "compiled"]
    parser.add_argument("--modes", nargs="+", choices=both, default=both, help="which (both)")


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
