"""Random training steps, and what happens in one, told moment by moment."""

from itertools import combinations

from hypothesis import strategies as st

from leannorm.planning.outcome import outcome
from leannorm.planning.timeline import Moment, Step, Value

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
        fused = seconds is not None and draw(st.booleans())
        values.append(Value(size, seconds, made_of, i, until, size, fused, draw(st.booleans())))
    moments = draw(st.integers(1, 6))
    reads = [tuple(draw(st.sets(st.integers(0, count - 1), max_size=3))) for _ in range(moments)]
    backward = [Moment(r, draw(st.booleans()), draw(st.sampled_from([0, 100, 300]))) for r in reads]
    beside = draw(st.lists(st.sampled_from([0, 50, 400]), min_size=count + moments, max_size=count + moments))
    stock = {i for read in reads for i in read} | {i for i, v in enumerate(values) if v.seconds is None}
    return Step(values, count, backward, beside, frozenset(stock), 0.1)


def network(rng, layers):
    """A chain of layers as networks have them: products, what follows from them cheaply, sums."""
    values, last = [Value(300, None, (), 0, 0, 300)], 0
    for _ in range(layers):
        moment, size = len(values), rng.choice([100, 200, 400, 800])
        kind = rng.choice(["product", "product", "cheap", "fused", "sum"])
        seconds = {"product": rng.choice([2, 4, 8]), "cheap": 1, "fused": 0.1, "sum": 1}[kind] * MILLI
        made_of = tuple({last, rng.randrange(len(values))}) if kind == "sum" else (last,)
        fused = kind == "fused"
        until = moment - 1 if fused else moment + 1
        values.append(Value(size, seconds, made_of, moment, until, size, fused, whole=kind == "product"))
        last = moment
    count = len(values)
    reads = [(i, *values[i].made_of[:1]) for i in range(count - 1, 0, -1)]
    stock = {i for read in reads for i in read}
    beside = [rng.choice([0, 100]) for _ in range(count + 1 + len(reads))]
    backward = [Moment(read, whole=values[read[0]].whole) for read in reads]
    return Step(values, count + 1, backward, beside, frozenset(stock), 4 * MILLI * layers)


def choices(step):
    """What follows from every set of values that can be made again."""
    can = [i for i, value in enumerate(step.values) if value.seconds is not None]
    for count in range(len(can) + 1):
        yield from (outcome(step, frozenset(chosen)) for chosen in combinations(can, count))


def told(step, again):
    """Bytes kept, seconds and bytes alive at each moment, by running the step."""
    values, start = step.values, step.forward
    uses = {i: [] for i in range(len(values))}  # (moment, in memory?)

    def use(i, moment, whole):
        uses[i].append((moment, whole))

    for moment, (reads, whole, _) in enumerate(step.backward, start):
        for i in reads:
            use(i, moment, whole)
    in_memory = {}
    for i in reversed(uses):
        if uses[i] and i in again:
            in_memory[i] = not values[i].fused or any(whole for _, whole in uses[i])
            moments = sorted(moment for moment, _ in uses[i])
            for source in values[i].made_of:  # made now; or computed by each reader
                for moment in moments[:1] if in_memory[i] else (moments[0], moments[-1]):
                    use(source, moment, values[i].whole)
    alive, taken = list(step.beside), set()
    for i, value in enumerate(values):
        size = dict.fromkeys(range(value.made, value.until + 1), value.again)
        if uses[i]:
            moments = [moment for moment, _ in uses[i]]
            kept = i not in again
            nbytes = value.nbytes if kept else value.again if in_memory[i] else 0
            last = max(moments)
            if nbytes and step.backward[last - start].writes == nbytes and last not in taken:
                taken.add(last)
                last -= 1
            first = max(value.made, value.until + 1) if kept else min(moments)
            size |= dict.fromkeys(range(first, last + 1), nbytes)
        for moment, nbytes in size.items():
            alive[moment] += nbytes
    seconds = sum(values[i].seconds for i in uses if uses[i] and i in again)
    return sum(values[i].nbytes for i in uses if uses[i] and i not in again), seconds, alive


def layers_to_move(count, nbytes=100, seconds=1 * MILLI, link=100 / MILLI):
    """Equal layers, forward and then backward; each saves a value that may be moved, or made again."""
    values = [Value(nbytes, 4 * seconds, (), i, i - 1, nbytes, ready=i) for i in range(count)]
    backward = [Moment((i,)) for i in reversed(range(count))]
    taken = [seconds] * count + [2 * seconds] * count
    return Step(
        values,
        count,
        backward,
        [0] * (2 * count),
        frozenset(range(count)),
        3 * seconds * count,
        0,
        taken,
        link,
    )
