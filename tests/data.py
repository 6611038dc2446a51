"""Real weights and prompts that are not part of the repository; tests that need them skip where they are missing."""

from pathlib import Path

DATA = Path(__file__).parents[2] / "shared" / "data"
MODELS, PROMPTS = DATA / "models", DATA / "prompts"
SMOLLM2 = MODELS / "smollm2-135m-instruct"
