"""Load shedding: which waiting queries are dropped, and which are deferred, when not all can meet their deadlines.

`shed.shed` is the entry of policies that drop queries; `deferral.deferred` that of plain orders, which only defer them.
"""
