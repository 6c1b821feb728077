"""Frames between processes."""

from __future__ import annotations

import os
import resource

import pytest

from pgflow_otp.otp.channel import Channel, ChannelBroken, Frame, FrameReader, encode_frame, readable


def test_frames_pass_whole_however_they_are_cut() -> None:
    data = encode_frame({"m": "a"}, b"payload") + encode_frame({"m": "b"}) + encode_frame({"m": "c"}, b"x" * 100_000)
    for size in (1, 7, 4096, len(data)):
        reader = FrameReader()
        frames = [f for i in range(0, len(data), size) for f in reader.feed(data[i : i + size])]
        assert frames == [({"m": "a"}, b"payload"), ({"m": "b"}, b""), ({"m": "c"}, b"x" * 100_000)]


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\3\0\0\0\0{x}"])
def test_garbage_is_an_error_not_a_frame(garbage: bytes) -> None:
    with pytest.raises(ChannelBroken):
        FrameReader().feed(garbage)


def test_a_half_frame_is_discarded_at_the_end() -> None:
    """Statement 200."""
    ours, theirs = Channel.pair()
    theirs.socket.send(encode_frame({"m": "a"})[:-1])
    theirs.close()
    assert ours.receive() == []
    assert ours.receive() == []
    assert not ours.is_open
    ours.close()


def test_sending_never_blocks_and_what_is_left_is_flushed_later() -> None:
    """Statement 198."""
    ours, theirs = Channel.pair()
    payload = b"x" * 3_000_000
    ours.send({"m": "big"}, payload)
    assert ours.has_unsent
    frames: list[Frame] = []
    while not frames:
        ours.flush()
        frames = theirs.receive()
    assert frames == [({"m": "big"}, payload)]
    assert not ours.has_unsent
    ours.close()
    theirs.close()


def test_sending_to_a_dead_reader_is_no_error() -> None:
    """Statement 188."""
    ours, theirs = Channel.pair()
    theirs.close()
    ours.send({"m": "anybody?"})
    assert not ours.has_unsent
    ours.close()


def test_a_descriptor_over_1024_can_be_waited_for() -> None:
    """A host may have many descriptors open."""
    highest = 1500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= highest:
        pytest.skip(f"the system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, highest + 1), hard))
    ours, theirs = Channel.pair()
    try:
        os.dup2(ours.fileno(), highest)
        try:
            assert not readable(highest, 0)
            theirs.send({"m": "a"})
            assert readable(highest, 5)
        finally:
            os.close(highest)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ours.close()
        theirs.close()


def test_the_end_of_a_channel_is_readable() -> None:
    ours, theirs = Channel.pair()
    theirs.close()
    assert readable(ours, 5)
    ours.close()
