"""The configurations of flash-attn-4 that are run: a few always, the rest where asked for."""

from __future__ import annotations

from flash_attn_fp8.sim.memory import Checks
from tests.sim.foreign.fa4 import BF16, E4M3, E5M2, F16, Case
from tests.sim.foreign.model import Mask

CAUSAL = Mask(causal=True)
WINDOW = Mask(left=70, right=30)
NO_PROXIES = Checks(proxies=False)
NO_PROXIES_NOR_UNINITIALISED = Checks(proxies=False, uninitialised=False)

CI = [
    Case("e4m3 full, several tiles", heads=2, kv_heads=2, seqlen_k=512, sm_count=1),
    Case("e4m3 gqa packed, causal", heads=4, pack_gqa=True, mask=CAUSAL),
    Case("e4m3 two CTAs", seqlen_q=512, heads=2, kv_heads=2, two_ctas=True),
    Case("e4m3 hd 256", head_dim=256, two_ctas=True),
    Case("e4m3 hd 64 split, causal", head_dim=64, splits=2, mask=CAUSAL, batch=2),
    Case("e4m3 paged 128, causal", page=128, batch=2, mask=CAUSAL),
    Case("bf16 causal", BF16, mask=CAUSAL),
    Case("bf16 varlen", BF16, lengths_q=(200, 3, 129), lengths_k=(300, 131, 64)),
]
# K and V by cp.async; see `test_the_missing_proxy_fence_of_cp_async_is_found`.
PAGED_CP_ASYNC = Case("e4m3 paged 16", page=16, batch=2, checks=NO_PROXIES)
# Q by cp.async, and only the rows that there are: the MMA reads the others as they are, and their
# results go nowhere ("we'll only write out the valid outputs", `pack_gqa.py`).
GQA_3 = Case(
    "bf16 gqa 3 packed",
    BF16,
    heads=3,
    pack_gqa=True,
    seqlen_q=100,
    checks=NO_PROXIES_NOR_UNINITIALISED,
)

SLOW = [
    Case("bf16 full", BF16, batch=2, heads=2, kv_heads=2, sm_count=1),
    Case("f16 full", F16, heads=2),
    Case("f16 causal", F16, mask=CAUSAL),
    Case("e5m2 full", E5M2, batch=2, heads=2, kv_heads=2),
    Case("e5m2 causal", E5M2, mask=CAUSAL),
    Case("e4m3 causal", mask=CAUSAL, batch=2),
    Case("e4m3 causal, more keys", mask=CAUSAL, seqlen_q=128, seqlen_k=640),
    Case("e4m3 causal, more queries", mask=CAUSAL, seqlen_q=384, seqlen_k=200),
    Case("e4m3 window", mask=WINDOW),
    Case("bf16 window", BF16, mask=WINDOW),
    Case("e4m3 left window, causal", mask=Mask(causal=True, left=100)),
    Case("e4m3 odd lengths", seqlen_q=197, seqlen_k=333),
    Case("bf16 odd lengths", BF16, seqlen_q=61, seqlen_k=77, heads=3, kv_heads=3),
    Case("bf16 gqa packed", BF16, heads=4, pack_gqa=True),
    Case("e4m3 gqa not packed", heads=4, kv_heads=2, pack_gqa=False),
    Case("e4m3 decode", seqlen_q=1, heads=8, pack_gqa=True, seqlen_k=512),
    Case("bf16 two CTAs", BF16, seqlen_q=512, heads=2, kv_heads=2, two_ctas=True),
    Case("e4m3 one CTA", seqlen_q=512, two_ctas=False, sm_count=1),
    Case("bf16 one CTA", BF16, seqlen_q=512, two_ctas=False, sm_count=1),
    Case("e4m3 hd 64", head_dim=64),
    Case("bf16 hd 64", BF16, 64),
    Case("bf16 hd 64, causal", BF16, 64, mask=CAUSAL),
    Case("e5m2 hd 64", E5M2, 64),
    Case("e4m3 hd 96", head_dim=96),
    Case("e4m3 hd 96, causal", head_dim=96, mask=CAUSAL),
    Case("bf16 hd 96", BF16, 96),
    Case("bf16 hd 96, causal", BF16, 96, mask=CAUSAL),
    Case("e4m3 hd (192, 128)", E4M3, 192, 128, seqlen_q=512, two_ctas=True),
    Case("e4m3 hd (192, 128), causal", E4M3, 192, 128, mask=CAUSAL),
    Case("bf16 hd (192, 128)", BF16, 192, 128, seqlen_q=512, two_ctas=True),
    Case("bf16 hd (192, 128) one CTA", BF16, 192, 128, seqlen_q=512, two_ctas=False),
    Case("e4m3 hd 256, causal", E4M3, 256, mask=CAUSAL, two_ctas=True),
    Case("e4m3 hd 256 one CTA", E4M3, 256, two_ctas=False),
    Case("bf16 hd 256", BF16, 256, seqlen_q=300, two_ctas=True),
    Case("bf16 hd 256, causal", BF16, 256, mask=CAUSAL, two_ctas=True),
    Case("bf16 hd 256 one CTA", BF16, 256, two_ctas=False),
    Case("bf16 paged 128", BF16, page=128, batch=2),
    PAGED_CP_ASYNC,
    Case("bf16 paged 64", BF16, page=64, seqlen_q=100, checks=NO_PROXIES),
    GQA_3,
    Case("e4m3 split", splits=3, seqlen_q=128, seqlen_k=640),
    Case("bf16 hd 64 split", BF16, 64, splits=3, seqlen_q=128, seqlen_k=640),
    Case("e4m3 varlen, causal", lengths_q=(200, 3, 129), lengths_k=(300, 131, 256), mask=CAUSAL),
    Case("e4m3 seqused", batch=2, used_q=(100, 256), used_k=(384, 130)),
    Case("bf16 seqused_k, causal", BF16, batch=2, used_k=(384, 257), mask=CAUSAL),
]

# Under other schedules.
SCHEDULED = [
    CI[0],
    Case("bf16 two CTAs, several tiles", BF16, seqlen_q=512, heads=2, kv_heads=2, two_ctas=True),
    Case("e4m3 hd 256, causal, two tiles", E4M3, 256, batch=2, mask=CAUSAL, two_ctas=True),
    Case("e4m3 split and combine", splits=2, heads=4, pack_gqa=True, seqlen_q=64, mask=CAUSAL),
]
