"""Writes the long prompts of the OpenLLaMA studies: 20 of 2,000 characters and 20 of 4,000, of Python's documentation.

The texts are those that come with Python for its `help()` (pydoc_data.topics, PSF License 2.0), so that whoever runs
a study has them, and they are English with code in it. One release of Python always gives the same file; another one
may not, so the studies keep the file itself.

    python -m benchmarks.long_prompts configs/studies/prompts_2k_4k.jsonl
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

from configs.common.base import write_atomically

VARIANTS = {"2k": 2000, "4k": 4000}
PROMPTS = 20


def long_prompts() -> str:
    """JSON lines: `{"variant": "2k", "prompt": ...}`, PROMPTS of each variant; no passage overlaps another."""
    begins = dict.fromkeys(sorted(topics), 0)
    found: dict[str, list[str]] = {}
    for variant, characters in sorted(VARIANTS.items(), key=lambda item: -item[1]):
        passages: list[str] = []
        while len(passages) < PROMPTS:
            fitting = [name for name, begin in begins.items() if len(topics[name]) - begin >= characters]
            assert fitting, f"too little text for {PROMPTS} passages of {characters} characters"
            for name in fitting[: PROMPTS - len(passages)]:
                passages.append(topics[name][begins[name] :][:characters])
                begins[name] += characters
        found[variant] = passages
    return "".join(
        json.dumps({"variant": variant, "prompt": passage}) + "\n" for variant in VARIANTS for passage in found[variant]
    )


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), long_prompts())
