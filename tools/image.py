"""What a container image needs of this checkout; its Dockerfile calls both

    image.py requirements               what to install, one a line, from settings.ini alone: torch by its exact version, every extra
    image.py stamp --venv /usr/local    tells `make` in the container that the image's own Python is the environment

Which versions of the rest: tools/image_constraints.txt, from an image that was built and tried."""
import argparse, json, sys
from pathlib import Path

import set_up


def stamp(venv):
    "Write what `set_up.py` would have written, and that the environment is an image's, so that nothing ever starts it over"
    wanted = set_up.wanted_stamp(venv, set_up.image_extra, image=True)
    (venv/set_up.stamp_name).write_text(json.dumps(wanted | dict(image=True)))

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('verb', choices=['requirements', 'stamp'])
    parser.add_argument('--venv', type=Path, default=Path(sys.prefix), help='for `stamp`: the environment')
    args = parser.parse_args()
    if args.verb=='stamp': stamp(args.venv)
    else: print('\n'.join(set_up.image_requirements()))

if __name__=='__main__': main()
