"""Stories of a release on real pools, a real router and a real ledger; faults between any steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from perennial.episode import end
from perennial.errors import NeedsHuman, Permanent
from perennial.ledger import Ledger
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import State
from perennial.store import verify
from serving import reconcile
from serving.flow import roll_back
from serving.release.report import rederive
from serving.router.routes import ModelRouting, write_routes
from tests.serving.conftest import FLAGS
from tests.support.serving import Server, start_server
from tests.support.story import Story, begin, quick
from tests.support.traffic import make_settings, routing


@pytest.fixture(scope="module")
def pools(server: Server, tmp_path_factory) -> Iterator[Settings]:
    """Settings of two running pools behind a running Envoy."""
    folder = tmp_path_factory.mktemp("canary")
    with start_server(folder, flags=FLAGS) as canary:
        yield from _behind_envoy(server, canary, tmp_path_factory.mktemp("flow"))


def _behind_envoy(server: Server, canary: Server, home: Path) -> Iterator[Settings]:
    settings = make_settings(
        home,
        stable_port=server.port,
        stable_rest_port=server.rest_port,
        canary_port=canary.port,
        canary_rest_port=canary.rest_port,
        poll_s=1,
    )
    with routing(settings):
        yield settings


@pytest.fixture
def spec(flights: ModelSpec) -> ModelSpec:
    return quick(flights)


@pytest.fixture
def story(pools: Settings, spec: ModelSpec, ledger: Ledger, exports: Path) -> Story:
    return begin(pools, spec, ledger, exports)


ENDS = (State.PROMOTED, State.ROLLED_BACK, State.INCONCLUSIVE, State.FAILED, State.SUPERSEDED)


def test_an_equal_candidate_is_promoted_stage_by_stage(story: Story) -> None:
    story.given_champion(1).given_candidate(2)
    done = story.until(*ENDS, candidate_loss=0.3)
    assert done.state is State.PROMOTED
    assert story.ledger.champion("flights").version == 2
    assert story.served() == ([2], [], 0.0)
    shares = [e.evidence["share"] for e in story.ledger.events(done.id) if "stage" in e.evidence]
    assert shares == [0.05, 0.25, 0.5]
    report = story.store.release("flights", done.id)
    verify(report)
    assert rederive(report) == []


def test_a_worse_candidate_is_rolled_back_and_fenced(story: Story) -> None:
    story.given_champion(1).given_candidate(2)
    done = story.until(*ENDS, candidate_loss=0.6)
    assert done.state is State.ROLLED_BACK
    last = story.ledger.events(done.id)[-1].evidence
    assert last["reason"] == "primary.worse"
    assert last["numbers"]["lower"] > 0
    assert story.ledger.fences("flights").keys() == {2}
    assert story.ledger.champion("flights").version == 1
    assert story.served() == ([1], [], 0.0)


@pytest.mark.parametrize("fault", ["failing", "not_a_number"])
def test_a_failing_candidate_is_rolled_back(story: Story, fault: str) -> None:
    story.given_champion(1).given_candidate(2)
    done = story.until(*ENDS, candidate_loss=0.3, **{fault: 0.5})
    assert done.state is State.ROLLED_BACK
    reason = story.ledger.events(done.id)[-1].evidence["reason"]
    # An answer that is no number has the largest loss: the one or the other sees it first.
    assert reason.startswith("guardrail.") or (fault, reason) == ("not_a_number", "primary.worse")


def test_the_routes_name_the_versions_and_mirror_while_shadowing(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[ModelRouting] = []

    def write(path: Path, models: dict[str, ModelRouting], **options: int) -> str:
        written.append(models["flights"])
        return write_routes(path, models, **options)

    story.given_champion(1).given_candidate(2)
    monkeypatch.setattr(reconcile, "write_routes", write)
    at_once = story.spec
    hour = {"shadow_duration": timedelta(hours=1)}
    story.spec = at_once.model_copy(update={"release": at_once.release.model_copy(update=hour)})
    assert [story.step().state for _ in range(2)] == [State.SHADOWING] * 2
    # The canary changes: no version is claimed. Then both are, and calls are mirrored.
    assert [(one.stable_version, one.canary_version) for one in written] == [(0, 0), (1, 2)]
    assert [one.shadow_percent for one in written] == [0, 100]
    story.spec = at_once
    assert [story.step().state for _ in range(2)] == [State.RAMPING] * 2
    assert (written[-1].share, written[-1].shadow_percent) == (0.05, 0)
    assert (written[-1].stable_version, written[-1].canary_version) == (1, 2)
    before = len(written)
    story.step()
    assert len(written) == before


def test_without_traffic_nothing_is_decided(story: Story) -> None:
    story.given_champion(1).given_candidate(2)
    for _ in range(5):
        episode = story.step()
    assert episode.state is State.RAMPING
    assert story.served() == ([1], [2], 0.05)
    before = episode.revision
    assert story.step().revision == before


class Crashing(Ledger):
    """Dies once before and once after every transition that it is asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.seen: dict[tuple[str, str, int], int] = {}

    def transition(self, episode, to, **kwargs):
        point = (episode.state, to, len(episode.data.get("stages", [])))
        self.seen[point] = self.seen.get(point, 0) + 1
        if self.seen[point] == 1:
            raise KeyboardInterrupt("before the commit")
        moved = super().transition(episode, to, **kwargs)
        raise KeyboardInterrupt("after the commit")
        return moved


@pytest.mark.parametrize(("loss", "expected"), [(0.3, State.PROMOTED), (0.6, State.ROLLED_BACK)])
def test_a_crash_before_and_after_every_commit_changes_nothing(
    story: Story, ledger_url: str, loss: float, expected: State
) -> None:
    story.given_champion(1).given_candidate(2)
    crashing = Crashing(ledger_url)
    crashes = 0
    for _ in range(80):
        story.traffic(candidate_loss=loss)
        try:
            story.step(crashing)
        except KeyboardInterrupt:
            crashes += 1
        if not story.ledger.episode(story.episode.id).is_open:
            break
    done = story.step()
    crashing.close()
    assert done.state is expected
    assert crashes == sum(crashing.seen.values()) >= 6
    assert story.ledger.verify_history(done.id) == done.revision
    winner = 2 if expected is State.PROMOTED else 1
    assert story.ledger.champion("flights").version == winner
    assert story.served() == ([winner], [], 0.0)
    verify(story.store.release("flights", done.id))


def test_the_champion_moved_meanwhile(story: Story, spec: ModelSpec) -> None:
    story.given_champion(1).given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    with story.ledger._session() as session:
        from perennial.tables import ChampionRow

        session.get_one(ChampionRow, "flights").revision += 1
    done = story.until(*ENDS, candidate_loss=0.3)
    assert done.state is State.SUPERSEDED
    assert story.ledger.champion("flights").version == 1
    assert story.served() == ([1], [], 0.0)


def test_an_operators_rollback_in_each_phase(story: Story) -> None:
    story.given_champion(1)
    with pytest.raises(NeedsHuman, match="no version before"):
        roll_back(story.settings, story.spec, story.ledger, actor="ann", reason="why not")
    story.given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    with pytest.raises(Permanent, match="reason"):
        roll_back(story.settings, story.spec, story.ledger, actor="ann", reason=" ")
    done = roll_back(story.settings, story.spec, story.ledger, actor="ann", reason="I saw it")
    assert done["withdrawn"] == 2
    assert story.served() == ([1], [], 0.0)
    story.given_candidate(3)
    promoted = story.until(*ENDS, candidate_loss=0.3)
    assert (promoted.state, story.served()[0]) == (State.PROMOTED, [3])
    done = roll_back(story.settings, story.spec, story.ledger, actor="ann", reason="complaints")
    assert done["champion"] == 1
    assert story.ledger.episode(promoted.id).state is State.ROLLED_BACK
    assert story.served() == ([1], [], 0.0)
    assert story.ledger.fences("flights") == {2: "I saw it", 3: "complaints"}
    with pytest.raises(NeedsHuman, match="is fenced"):
        roll_back(story.settings, story.spec, story.ledger, actor="ann", reason="again")


def test_an_abort_takes_the_candidate_out(story: Story) -> None:
    story.given_champion(1).given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    story.step()
    end(
        story.ledger,
        story.episode.id,
        State.ABORTED,
        actor="ann",
        reason="wrong week",
        cleanup=story.flow().cleanup,
    )
    assert story.served() == ([1], [], 0.0)


def test_a_candidate_that_cannot_be_loaded_fails_and_the_champion_serves(
    story: Story, exports: Path
) -> None:
    story.given_champion(1).given_candidate(2)
    target = story.store.version("flights", 2)
    shutil.rmtree(target)
    shutil.copytree(exports / "corrupt", target)
    done = story.until(*ENDS, candidate_loss=0.3)
    assert done.state is State.FAILED
    assert story.ledger.events(done.id)[-1].evidence["error"]["code"] == "pool.load_failed"
    assert story.served() == ([1], [], 0.0)


def test_a_route_that_somebody_changed_is_put_back(story: Story) -> None:
    story.given_champion(1).given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    story.step()
    from serving.router.routes import ModelRouting, routes_path

    write_routes(routes_path(story.settings), {"flights": ModelRouting(0.9, "mine")})
    story.step()
    assert story.served()[2] == 0.05
