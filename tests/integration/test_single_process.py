import pytest
import torch

from lazytrain_plugin.integration.single_process import LAUNCHER_VARIABLES, provide_rendezvous


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


def test_describes_one_process_where_nobody_did():
    environment = {"PATH": "/bin"}
    assert provide_rendezvous(environment)
    assert environment.keys() == {"PATH", *LAUNCHER_VARIABLES}
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("0", "1", "0")
    assert not provide_rendezvous(environment)


@pytest.mark.parametrize("name", [*LAUNCHER_VARIABLES, "OMPI_COMM_WORLD_SIZE"])
def test_leaves_what_a_launcher_began_alone(name):
    environment = {name: "1"}
    assert not provide_rendezvous(environment)
    assert environment == {name: "1"}


def test_leaves_an_existing_process_group_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    environment = {}
    assert not provide_rendezvous(environment)
    assert environment == {}
