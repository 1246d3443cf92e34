"""The run that tracker tests use."""

SMALL = {
    "dataset": "synthetic:train=300,test=60,side=8",
    "model": "softmax",
    "workers": 9,
    "servers": 2,
    "rounds": 30,
    "rule": "phocas:b=2",
    "attack": "sign-flip:q=2",
}
