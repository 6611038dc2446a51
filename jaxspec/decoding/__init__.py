"""The loop: prefill, then rounds of draft, verify, accept, commit and observe, inside one compiled call.

Row b has `length[b]` committed tokens. The caches hold the first length − 1 of them; the last one is pending, and the
next forward pass feeds it. A round feeds the pending token and K draft tokens, and commits 1 to K + 1 tokens. A round
runs only if length + K + 1 ≤ capacity in every row, finished rows included (more, if the drafter reaches farther), so
that no write passes the end of a cache.

All functions are pure and independent of the method; `engine` compiles them and decides when to call which.

`records` has the records and the writes to single rows, `prefilling` the pass over the prompts, `rounds` the loop, and
`scoring` the log-probabilities of given texts.
"""

from jaxspec.decoding.prefilling import (
    aux_drafter_of,
    empty_caches,
    end_prefill,
    feed,
    prefill,
    start_prefill,
)
from jaxspec.decoding.records import (
    Caches,
    DecodeState,
    Emitted,
    Parts,
    Request,
    Stats,
    grow,
    insert,
    resize,
    take_row,
)
from jaxspec.decoding.rounds import decode_round, run_rounds
from jaxspec.decoding.scoring import Scores, score

__all__ = [
    "Caches",
    "DecodeState",
    "Emitted",
    "Parts",
    "Request",
    "Scores",
    "Stats",
    "aux_drafter_of",
    "decode_round",
    "empty_caches",
    "end_prefill",
    "feed",
    "grow",
    "insert",
    "prefill",
    "resize",
    "run_rounds",
    "score",
    "start_prefill",
    "take_row",
]
