from .plain import NotSerialisableError as NotSerialisableError
from .programs import Encoded as Encoded, decode as decode, encode as encode
