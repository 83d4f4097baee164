import json,sys
R=[json.loads(l) for l in open('/work/main/memcalib/data/starter/records.jsonl')]
lang=sys.argv[1].split(',')
for r in R:
    if r['id'].startswith(('starter_conversations_','starter_health_','starter_general_')) and r['language'] in lang:
        print('##',r['id'],r['language'],r['domain'],'|',r['question'])
        for m in r['memories']: print('  ',m['atom_id'],m['u_star'],m.get('kind'),m.get('memory_action'),'|',m['text'])
