"""Images, audio and video under DDTREE: the request ends with HTTP 400, and its media are released."""

from http import HTTPStatus
from types import SimpleNamespace

import pytest
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ddtree import hooks


@pytest.fixture
def take(monkeypatch):
    """Give media to a request as SGLang's scheduler does, with the hook in place."""
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: SimpleNamespace(tp_rank=0))

    def give(running: bool):
        monkeypatch.setattr(hooks, "_ddtree_is_running", lambda: running)
        req = Req("rid", "", list(range(9)), SamplingParams(), vocab_size=256)
        released = []
        media = SimpleNamespace(release_features=lambda: released.append(True))
        hooks._refuse_media(Req.extend_image_inputs, req, media)
        return req, media, released

    return give


def test_a_request_with_media_is_refused_and_its_media_released(take):
    req, _, released = take(running=True)
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert "not supported with DDTREE" in req.to_finish.message
    assert released and req.multimodal_inputs is None


def test_other_servers_take_media(take):
    req, media, released = take(running=False)
    assert req.to_finish is None and req.multimodal_inputs is media and not released
