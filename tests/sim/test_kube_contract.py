"""The contract of the cluster port on the simulated API server, in virtual time."""

from __future__ import annotations

import pytest
from kube_contract.evicting import *  # noqa: F403
from kube_contract.reading import *  # noqa: F403
from kube_contract.sharing import *  # noqa: F403
from kube_contract.simulated import Simulated
from kube_contract.writing import *  # noqa: F403


@pytest.fixture
def side() -> Simulated:
    return Simulated()
