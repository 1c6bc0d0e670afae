from .choosing import BucketChoice as BucketChoice, ChosenBucket as ChosenBucket
from .making import Buckets as Buckets, buckets as buckets
