"""Random training steps, and what happens in one, told moment by moment."""

from itertools import combinations

from hypothesis import strategies as st

from leannorm.planning.timeline import Step, Value, outcome

MILLI = 1e-3


@st.composite
def steps(draw, most=9):
    """Steps in which everything can be kept; some values exist anyway, some may not be made again."""
    count = draw(st.integers(1, most))
    values = []
    for i in range(count):
        made_of = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        size = draw(st.sampled_from([0, 100, 200, 300, 500]))
        seconds = draw(st.sampled_from([None, 0.0, 1 * MILLI, 2 * MILLI, 5 * MILLI])) if made_of else None
        until = draw(st.integers(i - 1, count - 1))
        fused = seconds is not None and draw(st.booleans()) and until < i
        values.append(Value(size, seconds, made_of, i, until, 0 if fused else size))
    moments = draw(st.integers(1, 6))
    reads = [tuple(draw(st.sets(st.integers(0, count - 1), max_size=3))) for _ in range(moments)]
    beside = draw(st.lists(st.sampled_from([0, 50, 400]), min_size=count + moments, max_size=count + moments))
    stock = {i for read in reads for i in read} | {i for i, v in enumerate(values) if v.seconds is None}
    return Step(values, count, reads, beside, frozenset(stock), 0.1)


def network(rng, layers):
    """A chain of layers as networks have them: products, what follows from them cheaply, sums."""
    values, last = [Value(300, None, (), 0, 0, 300)], 0
    for _ in range(layers):
        moment, size = len(values), rng.choice([100, 200, 400, 800])
        kind = rng.choice(["product", "product", "cheap", "fused", "sum"])
        seconds = {"product": rng.choice([2, 4, 8]), "cheap": 1, "fused": 0.1, "sum": 1}[kind] * MILLI
        made_of = tuple({last, rng.randrange(len(values))}) if kind == "sum" else (last,)
        until = moment - 1 if kind == "fused" else moment + 1
        values.append(Value(size, seconds, made_of, moment, until, 0 if kind == "fused" else size))
        last = moment
    count = len(values)
    reads = [(i, *values[i].made_of[:1]) for i in range(count - 1, 0, -1)]
    stock = {i for read in reads for i in read}
    beside = [rng.choice([0, 100]) for _ in range(count + 1 + len(reads))]
    return Step(values, count + 1, reads, beside, frozenset(stock), 4 * MILLI * layers)


def choices(step):
    """What follows from every set of values that can be made again."""
    can = [i for i, value in enumerate(step.values) if value.seconds is not None]
    for count in range(len(can) + 1):
        yield from (outcome(step, frozenset(chosen)) for chosen in combinations(can, count))


def told(step, again):
    """Bytes kept, seconds and bytes alive at each moment, by running the step."""
    values, backward = step.values, range(step.forward, step.forward + len(step.reads))
    uses = {i: [] for i in range(len(values))}  # moments of the backward pass

    def use(i, moment):
        uses[i].append(moment)
        if i in again and (len(uses[i]) == 1 or not values[i].again):
            for source in values[i].made_of:  # made now; or computed by this reader, and each later one
                use(source, moment)

    for moment, read in zip(backward, step.reads, strict=True):
        for i in read:
            use(i, moment)
    needed = [i for i in uses if uses[i]]
    kept = [i for i in needed if i not in again]
    alive = list(step.beside)
    for i, value in enumerate(values):
        there = set(range(value.made, value.until + 1)) if value.again else set()
        size = dict.fromkeys(there, value.again)
        if i in kept:
            size |= {m: value.nbytes for m in range(value.made, max(uses[i]) + 1) if m not in there}
        elif i in needed and value.again:
            size |= dict.fromkeys(range(min(uses[i]), max(uses[i]) + 1), value.again)
        for moment, nbytes in size.items():
            alive[moment] += nbytes
    seconds = sum(values[i].seconds for i in needed if i in again)
    return sum(values[i].nbytes for i in kept), seconds, alive
