"""Creates the virtual environment that a `make` target needs; returns at once if it is ready

    set_up.py plain|lab|int8|site|dev [--venv .venv]    the library, plus JupyterLab, ONNX Runtime, Sphinx, development tools
    set_up.py newest [--venv .venv-newest]              the newest release of everything, without constraints.txt
    set_up.py image --venv /usr/local                   marks a container image's Python as ready for all but `newest`

uv installs the versions in constraints.txt, or pip if uv fails. The stamp is removed first and written last, so that a
set-up that failed or was interrupted starts over. The library is installed as editable: `git pull` updates it."""
import argparse, hashlib, json, os, re, shlex, shutil, subprocess, sys, time
from configparser import ConfigParser
from pathlib import Path
try: import fcntl
except ImportError: fcntl = None                     # Windows: a second set-up doesn't wait for the first

root, lock, stamp_name = Path(__file__).resolve().parent.parent, 'constraints.txt', 'gpubench-stamp.json'
packages = dict(plain='.', lab='.[lab]', int8='.[lab,int8]', site='.[lab,int8,site]', dev='.[dev]', newest='.[dev]')
order = list(packages)                               # each includes those before it; `newest` stands alone
version = '%d.%d' % sys.version_info[:2]
first_import = ("import gpubench, importlib, pkgutil\n"
                "for o in pkgutil.walk_packages(gpubench.__path__, 'gpubench.'): importlib.import_module(o.name)")
rebuild = ("The container's image was built from another constraints.txt or settings.ini. Build it again: "
           "\"Dev Containers: Rebuild Container\" in VS Code, or on the host `docker compose -f docker-compose.cpu.yml build` (or gpu).")

def sources():
    "A hash of everything that determines which packages and commands are installed"
    ini = ConfigParser(interpolation=None)
    ini.read_string((root/'settings.ini').read_text(encoding='utf-8'))
    decisive = 'lib_name', 'console_scripts', 'requirements'
    own = {k: v.split() for k,v in ini.defaults().items() if k.endswith(decisive)}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode() + (root/lock).read_bytes()).hexdigest()[:16]

def python(venv): return venv/('Scripts' if os.name=='nt' else 'bin')/'python'

def read_stamp(venv):
    "The stamp of the last complete set-up; empty if there was none"
    try: return json.loads((venv/stamp_name).read_text())
    except (OSError, ValueError): return {}

def works(venv, stamp):
    "Was the environment created here, and does its Python run, find the library, and have the version of $PYTHON?"
    code = "import sys, importlib.metadata as m; m.version('gpubench-kit'); print('%d.%d' % sys.version_info[:2])"
    try: found = subprocess.run([python(venv), '-c', code], cwd='/', capture_output=True, text=True).stdout.strip()
    except OSError: return False
    wanted = version if os.environ.get('PYTHON') else found
    return stamp.get('venv')==str(venv) and found==stamp['python']==wanted

def ready(venv, stamp, extra):
    "Does the environment work and have the right packages?"
    return works(venv, stamp) and stamp['sources']==sources() and order.index(stamp['extra'])>=order.index(extra)

def write_stamp(venv, **stamp):
    (venv/stamp_name).write_text(json.dumps(dict(venv=str(venv), sources=sources(), **stamp)))

def bar(output, n_bytes):
    "A progress bar for the announced downloads; unpacked, packages are about twice as large"
    expected = 2e6*sum(map(float, re.findall(r'Downloading \S+ \(([\d.]+) ?Mi?B', output)))
    return f"[{'#'*min(20, int(20*n_bytes/expected)):-<20}] " if expected else ''

def run(log, stage, *cmd, **env):
    "Run `cmd` in the checkout, with its output in `log` and one line on the screen. Did it succeed?"
    print(f'\n$ {shlex.join(map(str, cmd))}', file=log, flush=True)
    def free(): return shutil.disk_usage(root).free
    def output(): return Path(log.name).read_text(errors='replace').rpartition('\n$ ')[2]   # of this command
    clear, start, before = '\r\033[K' if sys.stdout.isatty() else '', time.monotonic(), free()
    env = {**os.environ, 'PIP_USER': '0', 'PIP_DISABLE_PIP_VERSION_CHECK': '1', **env}     # no venv allows PIP_USER=1
    p = subprocess.Popen(cmd, cwd=root, env=env, stdout=log, stderr=log)
    while p.poll() is None:
        time.sleep(.1)
        line = f'{clear}  {stage}: {bar(output(), before-free())}{time.monotonic()-start:.0f} s'
        if clear: print(line, end='', flush=True)
    print(f"{clear}  {stage}: {time.monotonic()-start:.0f} s{', failed' if p.returncode else ''}", flush=True)
    return p.returncode==0

def uv_env(venv):
    "The index and certificates configured for pip, under uv's names; also trust the system's certificates"
    listed = subprocess.run([python(venv), '-m', 'pip', 'config', 'list'], capture_output=True, text=True).stdout
    found = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed, re.M)[::-1])     # pip lists variables before files
    names = {'index-url': 'UV_DEFAULT_INDEX', 'cert': 'SSL_CERT_FILE'}
    return {'UV_SYSTEM_CERTS': '1', **{v: found[k] for k,v in names.items() if k in found}, **os.environ}

def install(log, venv, extra):
    "Install with uv, or with pip if that fails. Did one of them succeed?"
    pip = [python(venv), '-m', 'pip', 'install']
    uv = [python(venv), '-m', 'uv', 'pip', 'install', '--python', python(venv)]
    if extra=='newest': what = ['-e', packages[extra]]
    else: what, uv = ['-e', packages[extra], '-c', lock], [*uv, '-b', lock]
    if extra=='dev': uv.append('--compile-bytecode')                                       # tests start many processes
    if run(log, 'uv', *pip, '-c', lock, 'uv') and run(log, 'packages', *uv, *what, **uv_env(venv)): return True
    print('uv could not install the packages, so pip installs them, which takes a few minutes.', flush=True)
    return run(log, 'packages', *pip, *what)

def set_up(venv, extra):
    "Make `venv` ready for `extra`"
    if ready(venv, stamp := read_stamp(venv), extra):
        name = 'The image' if stamp.get('image') else venv.name
        return print(f'{name} is up to date.', flush=True)
    if stamp.get('image'): sys.exit(rebuild)
    with open(f'{venv}.log', 'a') as log:
        try:
            if fcntl: fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f'Another set-up of {venv.name} is running; waiting for it.', flush=True)
            fcntl.flock(log, fcntl.LOCK_EX)
        if ready(venv, stamp := read_stamp(venv), extra):                # another set-up may just have finished
            return print(f'{venv.name} is up to date.', flush=True)
        log.truncate(0)
        if extra=='newest' or not works(venv, stamp): stamp = {}
        verb = 'Updating' if stamp else 'Starting over with' if venv.exists() else 'Setting up'
        print(f'{verb} {venv.name}: about a minute on a fast network, up to 6 GB. Details: {log.name}', flush=True)
        (venv/stamp_name).unlink(missing_ok=True)
        extra = max(extra, stamp.get('extra', extra), key=order.index)
        base = getattr(sys, '_base_executable', sys.executable)      # this may be the Python in `venv`
        made = stamp or run(log, 'environment', base, '-m', 'venv', '--clear', venv)
        if not (made and install(log, venv, extra)):
            end = '\n'.join(Path(log.name).read_text(errors='replace').splitlines()[-8:])
            sys.exit(f'{end}\n\nThe set-up failed; {log.name} has all messages. Fix the cause and repeat the command.')
        if extra!='dev': run(log, 'first import', python(venv), '-c', first_import, PYTHONDONTWRITEBYTECODE='')
        write_stamp(venv, extra=extra, python=stamp.get('python', version))

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('extra', choices=[*packages, 'image'])
    parser.add_argument('--venv', type=Path, help='folder of the environment')
    args = parser.parse_args()
    venv = root/(args.venv or ('.venv-newest' if args.extra=='newest' else '.venv'))
    try: write_stamp(venv, extra='dev', python=version, image=True) if args.extra=='image' else set_up(venv, args.extra)
    except OSError as e: sys.exit(f'{e}. VENV=/path/to/folder puts the environment elsewhere.')
    except KeyboardInterrupt: sys.exit('\nInterrupted. The next make command starts the set-up over.')

if __name__=='__main__': main()
