"""Three policies on the same seeded overload, in the simulator: what each tenant gets."""

from dataclasses import replace

from cotenant.core.engine import Engine
from cotenant.metrics import OutcomeLog, summarise
from cotenant.policies import policy_class
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share
from cotenant.workload import arrivals, parse_workload
from cotenant.world.simulated import TableWorld

MS = 1_000_000
tenants = (
    Tenant("vision", slo_ns=250 * MS, cuts=(0, 1, 2, 3, 4, 5)),
    Tenant("text", slo_ns=100 * MS),
    Tenant("keyword", slo_ns=25 * MS),
)
tables = {
    "vision": LatencyTable((LatencyRow(0, 1, 1, 55 * MS),), unit_weights=(1,) * 5, segment_ratio=1.06),
    "text": LatencyTable((LatencyRow(0, 1, 1, 20 * MS),)),
    "keyword": LatencyTable((LatencyRow(0, 1, 1, 5 * MS),)),
}
rates = {"vision": 16.0, "text": 44.0, "keyword": 176.0}  # 1.3 times what two cores can do
workload = parse_workload(
    {"duration_s": 120.0, "seed": 1, "tenant": [{"model": name, "rate": rate} for name, rate in rates.items()]}
)
lanes = (Share((0,)), Share((1,)))

print("policy   vision    text  keyword   total   (share of all queries answered in time)")
for name in ("fcfs", "sjf", "edf"):
    policy = policy_class(name)(lanes)
    mine = tenants if policy.spec.preempt else tuple(replace(each, cuts=(0, each.unit_count)) for each in tenants)
    engine = Engine(mine, policy, TablePredictor(tables), Machine.cpu((0, 1)))
    log = OutcomeLog([tenant.name for tenant in tenants])
    sent = {}

    def queries(sent=sent):
        for number, (time_ns, position, _) in enumerate(arrivals(workload)):
            tenant = tenants[position]
            sent[number] = (tenant.name, time_ns)
            yield Query(number, tenant.name, time_ns, time_ns + tenant.slo_ns)

    def ended(respond, now_ns, log=log, sent=sent):
        tenant, arrival_ns = sent.pop(respond.query)
        log.add(tenant, arrival_ns, now_ns, respond.outcome)

    world = TableWorld(TablePredictor(tables), noise=0.05, seed=1)
    simulate(engine, world, queries(), ended, decision_ns=50_000)
    result = summarise(log, end_ns=workload.duration_ns)
    shares = [result.tenant(tenant.name).attainment for tenant in tenants]
    print(f"{name:6s}  {shares[0]:7.1%} {shares[1]:7.1%}  {shares[2]:7.1%} {result.total.attainment:7.1%}")
