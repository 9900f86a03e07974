"""The verifier: breaks good plans in every way that a file or a hand could, and sees each named."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.planning import Costs, Lowered, PlanError, ascending, lower, verify
from pipeloom.planning.words import parse
from pipeloom.schedules import Edge, Job, Phase, Schedule, Transfer, build, chain_edges

GOOD = [
    lower(
        build(name, stages=s, chunks=v, micro_batches=m),
        [*chain_edges(s * v, 8), *more],
        Costs.uniform(s * v),
    )
    for name, s, v, m, more in [
        ("1F1B", 2, 1, 3, []),
        ("ZBV", 2, 2, 3, []),
        ("VPP", 2, 2, 3, [Edge("F", 0, 3, 8), Edge("B", 3, 0, 8)]),
        ("ZBH1", 3, 1, 2, []),
    ]
]


def changed(plan, stage, jobs):
    return replace(plan, jobs=(*plan.jobs[:stage], tuple(jobs), *plan.jobs[stage + 1 :]))


def written(text, placement=(0, 1), micro_batches=1, edges=None, **fields):
    """A plan as a user writes it: one line a stage, entries between commas."""
    jobs = tuple(
        tuple(parse(entry.strip()) for entry in line.split(",") if entry.strip())
        for line in text.strip().splitlines()
    )
    edges = chain_edges(len(placement)) if edges is None else edges
    return Lowered("mine", tuple(placement), micro_batches, tuple(edges), jobs, **fields)


def fails(plan, check, says=None, **options):
    with pytest.raises(PlanError, match=says) as caught:
        verify(plan, **options)
    assert caught.value.check == check, caught.value
    return str(caught.value)


def test_good_plans_pass():
    for plan in GOOD:
        verify(plan)


pick = st.tuples(st.sampled_from(GOOD), st.randoms(use_true_random=False))


def somewhere(plan, rng):
    stage = rng.randrange(plan.stages)
    return stage, rng.randrange(len(plan.jobs[stage]))


@settings(max_examples=150, deadline=None)
@given(pick)
def test_a_dropped_entry_is_missed(case):
    plan, rng = case
    stage, index = somewhere(plan, rng)
    jobs = list(plan.jobs[stage])
    gone = jobs.pop(index)
    check = {Job: "jobs", Transfer: "transfers", Phase: "phases"}[type(gone)]
    text = fails(changed(plan, stage, jobs), check)
    if isinstance(gone, Job):
        key = gone._replace(kind="B") if gone.kind == "X" else gone
        assert str(key) in text
    if isinstance(gone, Transfer):
        assert gone.action in text
        assert f"{gone.direction}{gone.source}>{gone.target}.{gone.micro_batch}" in text


@settings(max_examples=150, deadline=None)
@given(pick)
def test_a_doubled_entry_is_seen(case):
    plan, rng = case
    stage, index = somewhere(plan, rng)
    jobs = list(plan.jobs[stage])
    jobs.insert(rng.randrange(len(jobs) - 1), jobs[index])
    again = plan.jobs[stage][index]
    check = {Job: "jobs", Transfer: "transfers", Phase: "phases"}[type(again)]
    fails(changed(plan, stage, jobs), check)


@settings(max_examples=150, deadline=None)
@given(pick)
def test_a_rerouted_entry_is_seen(case):
    plan, rng = case
    stage, index = somewhere(plan, rng)
    jobs = list(plan.jobs[stage])
    job = jobs[index]
    if isinstance(job, Transfer):
        jobs[index] = job._replace(peer=stage)
        fails(changed(plan, stage, jobs), "transfers", "belongs on stage")
    elif isinstance(job, Job):
        other = (stage + 1) % plan.stages
        del jobs[index]
        moved = changed(plan, stage, jobs)
        fails(changed(moved, other, [job, *moved.jobs[other]]), "jobs", f"{job} is on stage {other}")


@settings(max_examples=300, deadline=None)
@given(pick)
def test_a_swap_passes_only_if_it_is_safe(case):
    """Two entries change places. What the verifier lets pass must run to its end: an independent walk, one
    entry at a time in random order over the ranks, with blocking sends."""
    plan, rng = case
    stage, one = somewhere(plan, rng)
    other = rng.randrange(len(plan.jobs[stage]))
    jobs = list(plan.jobs[stage])
    jobs[one], jobs[other] = jobs[other], jobs[one]
    broken = changed(plan, stage, jobs)
    failed = ""
    try:
        verify(broken)
    except PlanError as error:
        failed = error.check
    assert failed in {"", "phases", "dependencies", "transfers", "channels", "cycle", "hang"}
    assert failed or runs(broken, rng)


def runs(plan, rng, buffered=False):
    """Whether a naive machine gets through: every rank runs its entries in order, values must be there. buffered:
    a send waits for nothing."""
    at, done, posted, sent = [0] * plan.stages, set(), [], []
    while True:
        able = []
        for stage in range(plan.stages):
            if at[stage] == len(plan.jobs[stage]):
                continue
            job = plan.jobs[stage][at[stage]]
            if isinstance(job, Transfer):
                ready = {
                    "post": True,
                    "send": buffered or job.message in posted,
                    "recv": job.message in sent,
                }[job.action]
                if job.action == "send":
                    made = "BX" if job.direction == "B" else "F"
                    assert any((k, job.source, job.micro_batch) in done for k in made)
            else:
                ready = True
                if isinstance(job, Job):
                    need(plan, job, stage, done, plan.jobs[stage][: at[stage]])
            if ready:
                able.append(stage)
        if not able:
            return all(a == len(jobs) for a, jobs in zip(at, plan.jobs, strict=True))
        stage = rng.choice(able)
        job = plan.jobs[stage][at[stage]]
        if isinstance(job, Transfer):
            {"post": posted, "send": sent}.get(job.action, []).append(job.message)
        else:
            done.add(tuple(job))
        at[stage] += 1


def need(plan, job, stage, done, before):
    """Asserts that a compute job's values are on its stage."""
    has = {(k, c, m) for k, c, m in (d for d in done if len(d) == 3)}
    whole = {("B", c, m) for k, c, m in has if k == "X"}
    if job.kind == "W":
        assert ("B", job.chunk, job.micro_batch) in has
        return
    if job.kind in "BX":
        assert ("F", job.chunk, job.micro_batch) in has
    for edge in plan.edges:
        if edge.target == job.chunk and edge.direction == ("F" if job.kind == "F" else "B"):
            if plan.placement[edge.source] == stage:
                assert (edge.direction, edge.source, job.micro_batch) in has | whole
            else:
                message = (edge.direction, edge.source, edge.target, job.micro_batch)
                assert any(
                    isinstance(b, Transfer) and b.action == "recv" and b.message == message for b in before
                )


def random_lists(rng):
    """Any orders that keep each stage's own dependencies, with each send after its producer, each recv before its
    consumer, and posts in the order of sends, somewhere before their recvs."""
    stages = rng.randint(2, 3)
    placement = list(range(stages)) + [rng.randrange(stages) for _ in range(rng.randrange(3))]
    micro_batches = rng.randint(1, 3)
    pairs = [(a, b) for b in range(len(placement)) for a in range(b)]
    edges = [Edge("F", a, b) for a, b in pairs] + [Edge("B", b, a) for a, b in pairs]
    edges = tuple(sorted(rng.sample(edges, rng.randint(1, len(edges)))))
    jobs = [random_order(rng, stage, placement, micro_batches, edges) for stage in range(stages)]
    channels = {}
    for stage, order in enumerate(jobs):
        for at, job in enumerate(order):
            for edge in edges:
                peer = placement[edge.target]
                if makes(job, edge) and peer != stage:
                    needs = next(
                        i
                        for i, j in enumerate(jobs[peer])
                        if takes(j, edge) and j.micro_batch == job.micro_batch
                    )
                    message = (*edge[:3], job.micro_batch)
                    channels.setdefault((stage, peer, edge.direction), []).append((at, needs, message))
    before = [[[] for _ in order] for order in jobs]
    after = [[[] for _ in order] for order in jobs]
    for (sender, receiver, _), messages in channels.items():
        first = 0
        for number, (at, _, message) in enumerate(messages):
            latest = min(need for _, need, _ in messages[number:])
            first = latest if rng.random() < 0.9 else rng.randint(first, latest)
            before[receiver][first].insert(len(before[receiver][first]), Transfer("post", *message, sender))
            after[sender][at].append(Transfer("send", *message, receiver))
        for _, needs, message in messages:
            before[receiver][needs].append(Transfer("recv", *message, sender))
    lists = tuple(
        (*(e for i, job in enumerate(order) for e in (*before[s][i], job, *after[s][i])), *PHASES)
        for s, order in enumerate(jobs)
    )
    return Lowered("mine", tuple(placement), micro_batches, edges, lists)


PHASES = (Phase("finalize"), Phase("update"))


def makes(job, edge):
    return job.chunk == edge.source and job.kind in ("F" if edge.direction == "F" else "BX")


def takes(job, edge):
    return job.chunk == edge.target and job.kind in ("F" if edge.direction == "F" else "BX")


def random_order(rng, stage, placement, micro_batches, edges):
    """A stage's jobs in a random order in which each follows what it needs of the same stage."""
    left = [
        Job(kind, chunk, m)
        for chunk, own in enumerate(placement)
        if own == stage
        for m in range(micro_batches)
        for kind in ("FX" if (chunk + m) % 2 else "FBW")
    ]
    order = []
    while left:
        able = []
        for job in left:
            needs = {("F", job.chunk), ("B", job.chunk)} if job.kind == "W" else set()
            needs |= {("F", job.chunk)} if job.kind in "BX" else set()
            needs |= {
                (e.direction, e.source) for e in edges if takes(job, e) and placement[e.source] == stage
            }
            waits = (j for j in left if j.micro_batch == job.micro_batch and j != job)
            if not any((("B" if j.kind == "X" else j.kind), j.chunk) in needs for j in waits):
                able.append(job)
        # mostly as a schedule would, else random: so that many run, and many don't
        job = (
            min(able, key=lambda j: (j.micro_batch, j.kind == "F"))
            if rng.random() < 0.9
            else rng.choice(able)
        )
        order.append(job)
        left.remove(job)
    return order


def verdict(plan):
    try:
        verify(plan)
    except PlanError as error:
        return error.check
    return ""


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_random_orders_pass_exactly_if_a_machine_can_finish_them(seed):
    rng = random.Random(seed)
    plan = random_lists(rng)
    check = verdict(plan)
    assert check in ("", "cycle", "hang")
    assert (check == "") == runs(plan, rng)
    assert (check == "cycle") == (not runs(plan, rng, buffered=True))


def test_random_orders_come_out_every_way():
    """The test above would prove nothing if all of its orders passed, or none."""
    seen = [verdict(random_lists(random.Random(seed))) for seed in range(300)]
    assert min(seen.count(check) for check in ("", "cycle", "hang")) >= 10, Counter(seen)


# ---- written by hand
# -------------------------------------------------------------------------------------------

TWO = """
F0.0, send F0>1.0 to stage 1, post B1>0.0 from stage 1, recv B1>0.0 from stage 1, X0.0, finalize, update
post F0>1.0 from stage 0, recv F0>1.0 from stage 0, F1.0, X1.0, send B1>0.0 to stage 0, finalize, update
"""


def test_a_plan_written_by_hand_passes():
    verify(written(TWO))


@pytest.mark.parametrize(
    ("old", "new", "check", "says"),
    [
        ("X0.0", "B0.0, W0.0", None, None),
        ("X0.0", "W0.0, B0.0", "dependencies", r"stage 0: W0.0 \(entry 4\) needs B0.0, which comes later"),
        ("X0.0", "B0.0, X0.0, W0.0", "jobs", "B0.0 twice"),
        ("X0.0", "B0.0", "jobs", "missing: W0.0 on stage 0"),
        ("X0.0", "X0.0, F1.0", "jobs", "F1.0 is on stage 0, but chunk 1 lives on stage 1"),
        ("X0.0", "X0.7", "entries", r"entry 4 of stage 0, X0.7, doesn't fit 2 chunks, 1 micro-batches"),
        ("X0.0", "X9.0", "entries", "doesn't fit"),
        ("F1.0, X1.0", "X1.0, F1.0", "dependencies", r"X1.0 \(entry 2\) needs F1.0"),
        (
            "finalize, update\np",
            "update, finalize\np",
            "phases",
            "stage 0's list must end with finalize and update",
        ),
        ("X0.0, finalize", "finalize, X0.0", "phases", "finalize at 4"),
        ("to stage 0, finalize, update", "to stage 0", "phases", r"stage 1's list .*has none"),
        ("F0.0, send F0>1.0 to stage 1", "send F0>1.0 to stage 1, F0.0", "dependencies", "before F0.0"),
        (
            "recv F0>1.0 from stage 0, F1.0",
            "F1.0, recv F0>1.0 from stage 0",
            "dependencies",
            "whose recv comes",
        ),
        (
            "post F0>1.0 from stage 0, recv F0>1.0 from stage 0",
            "recv F0>1.0 from stage 0, post F0>1.0 from stage 0",
            "transfers",
            r"stage 1 waits for F0>1.0 \(entry 0\) before its receive is posted \(entry 1\)",
        ),
        ("X1.0, send", "X1.0, post B0>1.0 from stage 0, send", "transfers", "no such message is needed"),
        ("X1.0, send", "X1.0, post B0>1.0 from stage 7, send", "entries", "doesn't fit"),
    ],
)
def test_one_mistake_in_a_plan(old, new, check, says):
    assert old in TWO
    plan = written(TWO.replace(old, new, 1))
    if check is None:
        verify(plan)
    else:
        fails(plan, check, says)


def test_blocked_sends_hang_and_the_circle_is_printed():
    """Both stages send before they post: fine where sends are buffered, a hang where they are not."""
    hanging = written(
        """
        F0.0, send F0>2.0 to stage 1, post F1>3.0 from stage 1, recv F1>3.0 from stage 1, F3.0
        F1.0, send F1>3.0 to stage 0, post F0>2.0 from stage 0, recv F0>2.0 from stage 0, F2.0
        """,
        placement=(0, 1, 1, 0),
        edges=[Edge("F", 0, 2), Edge("F", 1, 3)],
        forward_only=True,
    )
    text = fails(hanging, "hang", "ranks hang where a send blocks until its receive is posted")
    assert (
        "stage 0 stands at entry 1, send F0>2.0 to stage 1, and waits for entry 2 of stage 1, post F0>2.0"
        in text
    )
    assert (
        "stage 1 stands at entry 1, send F1>3.0 to stage 0, and waits for entry 2 of stage 0, post F1>3.0"
        in text
    )
    posted_first = written(
        """
        post F1>3.0 from stage 1, F0.0, send F0>2.0 to stage 1, recv F1>3.0 from stage 1, F3.0
        F1.0, send F1>3.0 to stage 0, post F0>2.0 from stage 0, recv F0>2.0 from stage 0, F2.0
        """,
        placement=(0, 1, 1, 0),
        edges=[Edge("F", 0, 2), Edge("F", 1, 3)],
        forward_only=True,
    )
    verify(posted_first)


def test_a_circle_of_data_is_no_matter_of_sends():
    circular = written(
        """
        post F1>3.0 from stage 1, recv F1>3.0 from stage 1, F3.0, F0.0, send F0>2.0 to stage 1
        post F0>2.0 from stage 0, recv F0>2.0 from stage 0, F2.0, F1.0, send F1>3.0 to stage 0
        """,
        placement=(0, 1, 1, 0),
        edges=[Edge("F", 0, 2), Edge("F", 1, 3)],
        forward_only=True,
    )
    text = fails(circular, "cycle", "program order and data have a circle")
    assert "stage 0 stands at entry 1, recv F1>3.0 from stage 1, and waits for entry 4 of stage 1" in text


def test_channels_keep_one_order():
    plan = GOOD[0]
    jobs = list(plan.jobs[1])
    posts = [i for i, job in enumerate(jobs) if isinstance(job, Transfer) and job.action == "post"]
    one, other = posts[0], posts[1]
    jobs[one], jobs[other] = jobs[other], jobs[one]
    text = fails(
        changed(plan, 1, jobs), "channels", "F messages from stage 0 to stage 1 are sent in one order"
    )
    assert "number 0 is sent as F0>1.0" in text
    assert "posted as F0>1.1" in text


def test_memory_limits():
    schedule = build("1F1B", stages=2, micro_batches=4)
    costs = Costs.uniform(2, held_weight=10, persistent=(5, 0))
    plan = lower(schedule, chain_edges(2), costs)
    verify(plan, costs=costs, memory_limit=25)
    verify(plan, costs=costs, memory_limit=[25, 10])
    fails(plan, "memory", "stage 0 needs 25 bytes at F0.1 and may use 24", costs=costs, memory_limit=24)
    fails(plan, "memory", "stage 1 needs 10 bytes at F1.0 and may use 9", costs=costs, memory_limit=[25, 9])
    with pytest.raises(ValueError, match="needs costs"):
        verify(plan, memory_limit=3)


def test_chunks_that_update_buffers_go_in_order():
    schedule = Schedule.from_jobs("mine", [0], 2, [["F0.1", "F0.0", "X0.0", "X0.1"]])
    plan = lower(schedule, [], Costs.uniform(1))
    verify(plan)
    fails(plan, "order", "stage 0 runs F0.1 before F0.0: chunk 0 updates buffers", ascending_chunks=[0])
    verify(lower(build("ZBH1", stages=2, micro_batches=4), [], Costs.uniform(2)), ascending_chunks=[0, 1])


@pytest.mark.parametrize(
    ("jobs", "is_ascending"),
    [
        ("F0.0 F0.1 X0.0 X0.1", True),
        ("F0.1 F0.0 X0.0 X0.1", False),
        ("F0.0 F0.1 X0.1 X0.0", False),
        ("F0.0 F0.1 B0.0 B0.1 W0.0 W0.1", True),
        ("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0", False),
        ("F0.0 F0.1 B0.0 X0.1 W0.0", False),  # W0.0 comes after the W in X0.1
        ("F0.0 F0.1 X0.0 B0.1 W0.1", True),
    ],
)
def test_ascending(jobs, is_ascending):
    assert ascending(Schedule.from_jobs("mine", [0], 2, [jobs.split()])) is is_ascending


def test_ascending_named():
    assert not ascending(build("ZBH1", stages=4, micro_batches=8))
    assert ascending(build("ZBH1", stages=4, micro_batches=8, ascending=True))
    assert ascending(build("ZBV", stages=4, chunks=2, micro_batches=8))


@pytest.mark.parametrize(
    "nonsense",
    [
        Lowered("x", (), 1, (), ()),
        Lowered("x", (0, 5), 1, (), ((), ())),
        Lowered("x", (0, 1), 0, (), ((), ())),
        Lowered("x", (0,), 1, (Edge("F", 0, 9),), ((),)),
        Lowered("x", (0,), 1, (("F", 0),), ((),)),
        Lowered("x", (0,), 1, (), (("F0.0",),)),
        Lowered("x", (0,), 1, (), ((Job("Q", 0, 0),),)),
        Lowered("x", (0,), 1, (), ((Job("F", 0, -1),),)),
        Lowered("x", (0,), 1, (), ((Job("F", 0, None),),)),
        Lowered("x", (0,), 1, (), ((Transfer("throw", "F", 0, 0, 0, 0),),)),
        Lowered("x", (0,), 1, (), ((Phase("dance"),),)),
        Lowered("x", (0,), 1, (), ((None,),)),
    ],
)
def test_nonsense_is_refused(nonsense):
    fails(nonsense, "entries")


def test_shuffled_lists_never_crash_the_verifier():
    for seed in range(200):
        rng = random.Random(seed)
        plan = rng.choice(GOOD)
        lists = [list(jobs) for jobs in plan.jobs]
        for _ in range(rng.randrange(1, 6)):
            a, b = rng.choice(lists), rng.choice(lists)
            if a:
                b.insert(rng.randrange(len(b) + 1), a.pop(rng.randrange(len(a))))
        broken = replace(plan, jobs=tuple(map(tuple, lists)))
        try:
            verify(broken)
        except PlanError:
            continue
        assert runs(broken, rng)


@pytest.mark.parametrize("text", ["F0.3", "post B3>1.0 from stage 2", "recv F0>1.2 from stage 0", "update"])
def test_words_come_back(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "Q0.1", "send F0>1.0 from stage 1", "post F0>1.0 to stage 1", 3, None]
)
def test_other_words_are_refused(text):
    with pytest.raises(ValueError):
        parse(text)
