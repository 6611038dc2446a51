"""Which method, and how long a draft, gives the most tokens per millisecond: costs, acceptance, and the choice."""
