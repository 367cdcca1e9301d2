"""Load shedding: selects the queries to drop or to defer when not all can meet their deadlines.

`shed.shed` is the entry for policies that drop queries; `deferral.deferred` for list policies, which only defer them.
"""
