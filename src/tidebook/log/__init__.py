"""The log: where every action lands first, in order, per partition."""
