"""Generate with a small transformer over caches of several formats.

Run it: python docs/examples/generate.py

The model is random, so its text means nothing; what can be compared is how far the logits of each
cache are from those of a bf16 one, when all are fed the tokens that the bf16 one chose. Prefill in
chunks ("extend"), then one token at a time ("decode"), through the same lines: append, attend. On a
GPU the kernels run, elsewhere their emulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import flash_attn_fp8 as fa

BATCH, PROMPT, CHUNK, NEW = 2, 96, 32, 16
VOCABULARY, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 256, 2, 8, 2, 64
WIDTH = HEADS * HEAD_DIM
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Bf16Cache:
    """The yardstick: keys and values as they are, with the interface of QuantizedKVCache."""

    def __init__(self) -> None:
        size = BATCH, PROMPT + NEW, HEADS_KV, HEAD_DIM
        self.k, self.v = (torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
        self.seqlens = torch.zeros(BATCH, dtype=torch.int32, device=DEVICE)

    def append(self, k: Tensor, v: Tensor) -> None:
        start = int(self.seqlens[0])  # all sequences are equally long here
        self.k[:, start : start + k.shape[1]], self.v[:, start : start + k.shape[1]] = k, v
        self.seqlens += k.shape[1]

    def attention_arguments(self) -> dict[str, Tensor]:
        return {"k_cache": self.k, "v_cache": self.v, "cache_seqlens": self.seqlens}


@dataclass
class Layer:
    """Attention and a gated MLP, pre-norm."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def random(cls, generator: torch.Generator) -> Layer:
        rows = (HEADS + 2 * HEADS_KV) * HEAD_DIM
        shapes = (rows, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)
        return cls(
            *(
                (torch.randn(s, generator=generator) * s[1] ** -0.5).bfloat16().to(DEVICE)
                for s in shapes
            )
        )

    def forward(self, x: Tensor, cache: fa.QuantizedKVCache | Bf16Cache) -> Tensor:
        """x (batch, tokens, width): new tokens, which see the cache and one another."""
        heads = (_normalised(x) @ self.qkv.T).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), dim=2)
        cache.append(k, v)
        seen = fa.flash_attn_with_kvcache(q, **cache.attention_arguments(), causal=True)
        x = x + seen.flatten(2) @ self.out.T
        a, b = (_normalised(x) @ self.up.T).chunk(2, dim=-1)
        return x + (torch.nn.functional.silu(a) * b) @ self.down.T


class Model:
    """Token embeddings plus sinusoids of the position; the embeddings are the output layer, too."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator).bfloat16().to(DEVICE)
        self.layers = [Layer.random(generator) for _ in range(LAYERS)]

    def logits(self, tokens: Tensor, start: int, caches: list) -> Tensor:
        """Of the token after the last; `caches`: one a layer."""
        position = torch.arange(start, start + tokens.shape[1], device=DEVICE)[:, None]
        rate = torch.exp(-torch.arange(0, WIDTH, 2, device=DEVICE) / WIDTH * 9.2)
        wave = torch.cat([torch.sin(position * rate), torch.cos(position * rate)], -1)
        x = self.embedding[tokens] + wave.bfloat16()
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.forward(x, cache)
        return _normalised(x[:, -1]).float() @ self.embedding.float().T / WIDTH**0.5


def _normalised(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],))


def run(model: Model, caches: list, prompt: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """(tokens (batch, NEW), their logits): greedy, or along the tokens `forced`."""
    for start in range(0, PROMPT, CHUNK):
        logits = model.logits(prompt[:, start : start + CHUNK], start, caches)
    tokens, all_logits = [], []
    for step in range(NEW):
        all_logits.append(logits)
        tokens.append(logits.argmax(-1) if forced is None else forced[:, step])
        logits = model.logits(tokens[-1][:, None], PROMPT + step, caches)
    return torch.stack(tokens, 1), torch.stack(all_logits, 1)


def quantized(dtype: torch.dtype) -> list:
    """A cache for each layer."""
    size = BATCH, PROMPT + NEW, HEADS_KV, HEAD_DIM
    return [fa.QuantizedKVCache(*size, dtype=dtype, device=DEVICE) for _ in range(LAYERS)]


def main() -> dict[str, float]:
    """Print the comparison; the relative error of the logits of each format."""
    model = Model()
    prompt = torch.randint(VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    tokens, wanted = run(model, [Bf16Cache() for _ in range(LAYERS)], prompt.to(DEVICE), None)
    errors = {}
    for name, dtype in (
        ("e4m3", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
        ("int8", torch.int8),
    ):
        _, logits = run(model, quantized(dtype), prompt.to(DEVICE), tokens)
        errors[name] = float((logits - wanted).norm() / wanted.norm())
        agree = float((logits.argmax(-1) == tokens).float().mean())
        print(
            f"{name}: logits differ by {errors[name]:.4f}, {agree:.0%} of the tokens are the same"
        )
    return errors


if __name__ == "__main__":
    main()
