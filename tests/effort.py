"""How much the tests do: a sample of crashes in every run, all of them where that is asked for."""

import os

# `OOC_EMBED_FULL_MATRIX=1 pytest ...`: hours, not minutes.
FULL = bool(os.environ.get("OOC_EMBED_FULL_MATRIX"))
# Moments at which a signal comes, of each call it cuts off: `OOC_EMBED_MOMENTS=200 pytest ...`.
MOMENTS = int(os.environ.get("OOC_EMBED_MOMENTS", "3"))
