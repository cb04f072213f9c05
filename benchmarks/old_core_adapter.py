"""DELETE: the new ops' names on the old core."""

from het_tf import ops

if not hasattr(ops, "cache_gather"):
    ops.unique_ids = ops.dedup
    _handle, _table = ops.cache_handle, ops.table_handle
    _rows = {}

    def cache_handle(*, capacity, clock, read_bound, write_bound, **kw):
        if clock == "drift":
            clock = "count"
            read_bound, write_bound = (
                -1 if b < 0 else max(b * 10 >> 20, 0) for b in (read_bound, write_bound)
            )
        if capacity == 0:
            return _handle(capacity=2**31 - 1, server_applies=True, clock=clock, **kw)
        return _handle(
            capacity=capacity, clock=clock, read_bound=read_bound, write_bound=write_bound, **kw
        )

    def table_handle(*, clock, **kw):
        return _table(clock="count" if clock == "drift" else clock, **kw)

    def cache_install(cache, ticket, replies):
        _rows[0] = ops.cache_fill(cache, ticket, replies)

    ops.cache_handle, ops.table_handle, ops.cache_install = (
        cache_handle,
        table_handle,
        cache_install,
    )
    ops.cache_gather = lambda cache, ticket: _rows[0]
