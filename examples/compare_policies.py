"""Three policies on the same seeded overload, in the simulator: what each tenant gets. No model is needed."""

import cotenant

models = {
    "vision": cotenant.AssumedModel(slo_ms=250, latency_ms=55, units=5, segment_ratio=1.06),
    "text": cotenant.AssumedModel(slo_ms=100, latency_ms=20),
    "keyword": cotenant.AssumedModel(slo_ms=25, latency_ms=5),
}
rates = {"vision": 16.0, "text": 44.0, "keyword": 176.0}  # 1.3 times what two cores can do
tenants = [{"model": name, "rate": rate} for name, rate in rates.items()]
workload = {"duration_s": 120.0, "seed": 1, "tenant": tenants}

print("policy   vision    text  keyword   total   (share of all queries answered in time)")
for policy in ("fcfs", "sjf", "edf"):
    run = cotenant.simulate(workload, models, policy=policy, settings={"device.cores": [0, 1]})
    shares = [run.tenant(name).attainment for name in models]
    print(f"{policy:6s}  {shares[0]:7.1%} {shares[1]:7.1%}  {shares[2]:7.1%} {run.summary.total.attainment:7.1%}")
