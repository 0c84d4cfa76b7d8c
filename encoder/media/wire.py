"""What an encoder and its decode workers say to each other over a seqpacket socket.

Messages are small msgspec structs; media bytes and pixels travel as sealed memory files beside them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import msgspec
import numpy as np
from numpy.typing import NDArray

from transom.errors import MediaError
from transom.messages import MediaSize

# A plan of 3,600 frames takes 90 KB; the kernel's default buffers take no more than this.
MAX_MESSAGE_BYTES = 160 * 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class ImageJob(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """Decode one picture; fd: the file. Answered by Measured and one Picture."""

    factor: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float
    max_image_pixels: int
    full_decode_pixels: int
    max_tokens: int
    background: tuple[int, int, int]
    frame_index: int
    reduced_jpeg: bool = False  # decode JPEGs at the smallest of libjpeg's scales that the model needs


class AudioJob(msgspec.Struct, frozen=True, kw_only=True, tag="audio"):
    """Decode one sound; fd: the file. Answered by Measured and Sounds, the last of them marked."""

    sampling_rate: int
    piece_samples: int
    max_audio_s: float


class VideoJob(msgspec.Struct, frozen=True, kw_only=True, tag="video"):
    """Plan a clip: which frames are taken, how they are got; fd: the file. Answered by one ClipHead."""

    factor: int
    min_pixels: int
    max_pixels: int
    total_max_pixels: int
    max_aspect_ratio: float
    max_image_pixels: int
    full_decode_pixels: int
    max_tokens: int
    fps: float
    min_frames: int
    max_frames: int
    temporal_patch: int
    max_video_s: float
    threads: int
    sound: AudioJob | None


class RunPlan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled frames that are decoded one after the other, from a keyframe on; runs are independent.

    `goals` are the stamps of frames (pts, or their numbers where there are no times), ascending; `keys`
    the stamp of the keyframe that each can be reached from. The frames of the next run begin at `end`.
    """

    first: int  # position of the first goal among all sampled frames
    goals: tuple[int, ...]
    keys: tuple[int, ...]
    end: int | None


class SliceJob(msgspec.Struct, frozen=True, kw_only=True, tag="slice"):
    """Decode a slice of a run of a planned clip; fd: the file. Answered by FrameUnits.

    A worker that decoded the slice before goes on where it stands. `clip` tells clips apart.
    """

    clip: int
    first: int
    goals: tuple[int, ...]
    keys: tuple[int, ...]
    begin: int
    stop: int
    end: int | None
    height: int
    width: int
    temporal_patch: int
    timed: bool
    can_jump: bool
    frame_ticks: int
    threads: int
    decoder: str = "pyav"


class TrackJob(msgspec.Struct, frozen=True, kw_only=True, tag="track"):
    """Decode some pieces of a clip's sound; fd: the file. Answered by Sounds, the track's last marked.

    A worker that decoded the piece before goes on where it stands, others begin anew.
    """

    clip: int
    sound: AudioJob
    first: int
    pieces: int


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """A clip is over: let go of what is open of it."""

    clip: int


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """One Picture, FrameUnit or Sound was taken over; the worker may send one more."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Nobody wants the rest of the job."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """What the header of a picture or sound says of its size; comes before anything is decoded."""

    size: MediaSize


class Picture(msgspec.Struct, frozen=True, kw_only=True, tag="picture"):
    """fd: uint8 (height, width, 3); `target` is the (height, width) to resize to."""

    height: int
    width: int
    target: tuple[int, int]


class ClipHead(msgspec.Struct, frozen=True, kw_only=True, tag="clip"):
    """The plan of a clip: times of its sampled frames, sizes of frames before and after resizing, runs."""

    timestamps: tuple[float, ...]
    height: int
    width: int
    target: tuple[int, int]
    runs: tuple[RunPlan, ...]
    timed: bool
    can_jump: bool
    frame_ticks: int
    has_sound: bool
    notes: tuple[str, ...]
    size: MediaSize


class FrameUnit(msgspec.Struct, frozen=True, kw_only=True, tag="unit"):
    """fd: uint8 (frames, height, width, 3): one temporal patch; `position` of its first sampled frame."""

    position: int
    frames: int
    height: int
    width: int


class Sound(msgspec.Struct, frozen=True, kw_only=True, tag="sound"):
    """fd: float32 (samples,), mono at the job's rate; a piece of the track, in order."""

    samples: int
    last: bool


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The job is done, or stopped."""

    notes: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The item is at fault."""

    message: str


Job = ImageJob | AudioJob | VideoJob | SliceJob | TrackJob
Request = Job | Ack | Stop | Forget
Reply = Measured | Picture | ClipHead | FrameUnit | Sound | Finished | Failed

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def send(sock: socket.socket, message: Request | Reply, fd: int | None = None) -> None:
    """Send one message, with a file that the receiver gets a descriptor of."""
    data = _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes, limit {MAX_MESSAGE_BYTES}")
    socket.send_fds(sock, [data], [] if fd is None else [fd])


def receive_bytes(sock: socket.socket, flags: int = 0) -> tuple[bytes, int | None]:
    """Receive one message and its file; raise EOFError when the other side is gone."""
    data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC | flags)
    if not data:
        for fd in fds:
            os.close(fd)
        raise EOFError("the other side is gone")
    for fd in fds[1:]:
        os.close(fd)
    return data, fds[0] if fds else None


def receive_request(sock: socket.socket) -> tuple[Request, int | None]:
    """Receive one message of the encoder; raise EOFError when it is gone."""
    data, fd = receive_bytes(sock)
    return _REQUESTS.decode(data), fd


def receive_reply(sock: socket.socket) -> tuple[Reply, int | None]:
    """Receive one message of a worker; raise EOFError when it is gone."""
    data, fd = receive_bytes(sock)
    return _REPLIES.decode(data), fd


class MemoryFile:
    """Anonymous shared memory of fixed size. It vanishes with its last descriptor and mapping.

    Sealed against shrinking: a mapping of it can't fault, whatever the process on the other side does.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("transom-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, max(size_bytes, 1))
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.view = memoryview(mmap.mmap(self.fd, max(size_bytes, 1)))[:size_bytes]
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the descriptor; views stay valid as long as they are referenced."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        # Whoever was to close it may have been cancelled while a thread made it.
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)

    def duplicate(self) -> MemoryFile:
        """Return another descriptor and the same view of this memory, closed on its own."""
        other = MemoryFile.__new__(MemoryFile)
        other.size_bytes, other.view, other.fd = self.size_bytes, self.view, os.dup(self.fd)
        return other

    @classmethod
    def adopt(cls, fd: int) -> MemoryFile:
        """Take over a received descriptor, without mapping it here."""
        file = cls.__new__(cls)
        file.size_bytes, file.view, file.fd = os.fstat(fd).st_size, memoryview(b""), fd
        return file

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> MemoryFile:
        """Return a file with these bytes."""
        file = cls(len(data))
        file.write(data)
        return file

    @classmethod
    def sealed(cls, data: bytes | bytearray | memoryview) -> MemoryFile:
        """Return a file with these bytes, not mapped here, that nobody can change any more."""
        file = cls.adopt(os.memfd_create("transom-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            file.write(data)
            fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            file.close()
            raise
        file.size_bytes = len(data)
        return file

    def map_sealed(self, size_bytes: int) -> None:
        """Map a received file of so many bytes; ValueError unless nobody can change it any more."""
        seals = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
        if os.fstat(self.fd).st_size != size_bytes or seals & _SEALS != _SEALS:
            raise ValueError(f"{size_bytes} bytes of sealed memory were announced, others came")
        self.size_bytes = size_bytes
        if size_bytes:
            # Private: older kernels map no sealed memory as shared. Nothing is ever copied: nobody writes.
            memory = mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            self.view = memoryview(memory)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Fill it from the start. Half as expensive as through the mapping, which faults in each page."""
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self.fd, view[done:], done)


def map_array(fd: int | None, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Map a received memory file as an array and close the descriptor; check that it can't fault."""
    if fd is None:
        raise MediaError("a decoder answered without data")
    try:
        size_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if size_bytes == 0:
            return np.empty(shape, dtype)
        if os.fstat(fd).st_size < size_bytes:
            raise MediaError(f"a decoder announced {size_bytes} bytes and sent {os.fstat(fd).st_size}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise MediaError("a decoder sent memory that it may take back")
        memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return np.frombuffer(memory, dtype=dtype).reshape(shape)
    finally:
        os.close(fd)
