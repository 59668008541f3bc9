"""The contract of the cluster port on a real API server; what was written is read from its audit log."""

from __future__ import annotations

import pytest
from controlplane.running import ControlPlane
from kube_contract.evicting import *  # noqa: F403
from kube_contract.reading import *  # noqa: F403
from kube_contract.real import Real
from kube_contract.sharing import *  # noqa: F403
from kube_contract.writing import *  # noqa: F403


@pytest.fixture
def side(plane: ControlPlane) -> Real:
    return Real(plane)
