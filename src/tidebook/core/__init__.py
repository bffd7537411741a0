"""The pure core: keys, actions, fold, record codec, replication plan, errors. No I/O, no asyncio, no clock."""
