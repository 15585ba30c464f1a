"""What a container image needs of this checkout; its Dockerfile calls both

    image.py requirements               what to install, one a line, from settings.ini alone: torch by its exact version, every extra
    image.py stamp --venv /usr/local    tells `make` in the container that the image's own Python is the environment

Which versions of the rest: tools/image_constraints.txt, from an image that was built and tried."""
import argparse, json, shlex, sys
from pathlib import Path

import set_up

keys = ['image_torch', 'requirements', 'lab_requirements', 'int8_requirements', 'dev_requirements']
left_out = ['playwright']                            # 165 MB for tests in a browser, which an image does not have; they are skipped
extra = 'dev'                                        # what these keys hold together


def requirements():
    "What is installed into an image"
    wanted = [o for k in keys for o in shlex.split(set_up.setting(k), comments=True)]
    return [o for o in wanted if not o.startswith(tuple(left_out))]

def stamp(venv):
    "Write what `set_up.py` would have written, and that the environment is an image's, so that nothing ever starts it over"
    wanted = set_up.wanted_stamp(venv, extra)
    (venv/set_up.stamp_name).write_text(json.dumps(wanted | dict(image=True)))

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('verb', choices=['requirements', 'stamp'])
    parser.add_argument('--venv', type=Path, default=Path(sys.prefix), help='for `stamp`: the environment')
    args = parser.parse_args()
    if args.verb=='stamp': stamp(args.venv)
    else: print('\n'.join(requirements()))

if __name__=='__main__': main()
