"""Method `auto` in the engine: candidates, turns and the record of choices."""
