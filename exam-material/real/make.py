import json,random
from ex5 import SEL
from memcalib.problem import load_examples, remove_atoms, render
ex={e.id:e for e in load_examples('starter')}
sel=[tuple(s) for s in SEL]
random.Random(5103).shuffle(sel)
plan=[]; files={k:[] for k in range(1,7)}
for n,(e,a) in enumerate(sel,1):
    item=f'real_{n:03}'
    assert ex[e].levels[a].wire=='C'
    whole=render(ex[e],text='concat'); cut=render(remove_atoms(ex[e],[a]),text='concat')
    runs={}
    for k in range(1,7):
        w=(k<=3)==(n%2==0)
        runs[k]='whole memory' if w else 'without the atom'
        files[k].append({'item':item,'messages':whole if w else cut})
    assert whole!=cut
    plan.append({'item':item,'example_id':e,'atom_id':a,'text':'concat','prompt_template':'plain','runs':runs})
for k,rows in files.items():
    with open(f'/tmp/exam/real/prompts_{k}.jsonl','w') as f:
        for r in rows: f.write(json.dumps(r,ensure_ascii=False)+'\n')
with open('/tmp/exam/real/plan.jsonl','w') as f:
    for r in plan: f.write(json.dumps(r,ensure_ascii=False)+'\n')
